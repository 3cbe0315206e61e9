"""The bundled demo model: a tiny Qwen3-MoE that echoes a word, and adapters for other tasks."""

import os
from pathlib import Path

DEMO_NAME = "vexpert-demo"  # what the bundled model is served as; its own name is a folder
TOOL_FORMAT = "hermes"  # of its chat template; a name of server.tools.formats.FORMATS
_FOLDER = Path(__file__).resolve().parent


def model_path() -> Path:
    """The folder of the demo's base model and tokenizer."""
    return _FOLDER / "model"


def is_demo(name: str) -> bool:
    """Whether a model's name or folder, however written, is the demo's; "" is."""
    return not name or os.path.realpath(name) == os.path.realpath(_FOLDER / "model")


def find_model(name: str) -> str:
    """`name`; for "", and for DEMO_NAME where no such folder is, the demo's folder."""
    if not name or (name == DEMO_NAME and not os.path.isdir(name)):
        return str(model_path())
    return name


def adapter_paths() -> dict[str, Path]:
    """The folder of each demo adapter, by adapter name."""
    configs = sorted(_FOLDER.glob("adapters/*/adapter_config.json"))
    return {config.parent.name: config.parent for config in configs}
