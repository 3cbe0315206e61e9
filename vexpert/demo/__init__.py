"""The bundled demo model: a tiny Qwen3-MoE that echoes a word, and adapters for other tasks."""

from pathlib import Path

DEMO_NAME = "vexpert-demo"  # what the bundled model is served as; its own name is a folder
_FOLDER = Path(__file__).resolve().parent


def model_path() -> Path:
    """The folder of the demo's base model and tokenizer."""
    return _FOLDER / "model"


def adapter_paths() -> dict[str, Path]:
    """The folder of each demo adapter, by adapter name."""
    configs = sorted(_FOLDER.glob("adapters/*/adapter_config.json"))
    return {config.parent.name: config.parent for config in configs}
