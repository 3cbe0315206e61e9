"""Every MoE architecture of the installed transformers, and the table of docs/models.md."""

import re
from pathlib import Path

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from vexpert.models.support import EXACT_DENSE, EXACT_MOE, refusal

TABLE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
MODELS = Path(transformers.__file__).parent / "models"
HAS_EXPERTS = re.compile(r"^class \w*(Experts|Moe|MoE|MOE|SparseMLP)\w*\(nn\.Module", re.MULTILINE)
HEADER = """# Model architectures

Made by `python scripts/make_model_table.py`; `tests/test_models_sweep.py` checks it.

*Exact*: logits equal transformers' eager attention and experts within a relative error of 1e-5 in
float32, sequences one by one, whatever chunks and decodes share a step. Every other architecture is
refused at load with the reason. Names are transformers' model types. A multimodal checkpoint counts
as its text model where transformers has one.

## Mixture of experts

Every architecture of transformers {version} with experts.

| model type | served | reason |
|---|---|---|
"""


def moe_types() -> list[str]:
    """Model types of the installed transformers whose modeling file has a class of experts.

    Those that borrow another type's file are added by name.
    """
    found = sorted(EXACT_MOE & set(CONFIG_MAPPING_NAMES))
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        folder = MODELS / model_type_to_module_name(model_type)
        source = folder / f"modeling_{folder.name}.py"
        if source.exists() and HAS_EXPERTS.search(source.read_text()):
            found.append(model_type)
    return sorted(set(found))


def reason(model_type: str) -> str | None:
    """Why the default config of `model_type` is refused; None: it is served."""
    return refusal(AutoConfig.for_model(model_type))


def make_table() -> str:
    """The text of docs/models.md for the installed transformers."""
    lines = []
    for model_type in moe_types():
        why = reason(model_type)
        lines.append(f"| {model_type} | {'refused' if why else 'exact'} | {why or ''} |\n")
    dense = ", ".join(sorted(EXACT_DENSE))
    head = HEADER.format(version=transformers.__version__)
    return head + "".join(lines) + f"\n## Dense, exact by the same test\n\n{dense}.\n"


def read_table(text: str) -> dict[str, tuple[str, str]]:
    """Model type -> (served, reason) of the rows in `text`."""
    cells = re.findall(r"^\| (\S+) \| (exact|refused) \| (.*?) ?\|$", text, re.MULTILINE)
    return {name: (served, why) for name, served, why in cells}
