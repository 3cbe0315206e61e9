"""Imports point one way: cli -> server -> engine -> models -> lora, moe -> ops -> kernels.

`bench` lies beside all of them: only the command line may import it.
"""

import ast
from pathlib import Path

import pytest

import vexpert

ROOT = Path(vexpert.__file__).parent
RANK = {
    "kernels": 0,
    "ops": 1,
    "moe": 2,
    "lora": 3,
    "models": 4,
    "engine": 5,
    "server": 6,
    "bench": 7,
    "cli": 8,
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in RANK)


def imported_layers(source: str) -> set[str]:
    """Top folders of vexpert that a file imports anywhere, type-checking imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("vexpert.")]
    return {part[1] for part in parts if part[1] in RANK}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    above = {name for name in imported_layers(path.read_text()) if RANK[name] > RANK[layer]}
    assert not above, f"{layer} must not import {sorted(above)}"


def test_an_upward_import_is_seen() -> None:
    assert imported_layers("from vexpert.engine import llm\nimport vexpert.ops.types") == {
        "engine",
        "ops",
    }
