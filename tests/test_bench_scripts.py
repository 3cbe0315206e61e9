"""The scripts in bench/: what they import exists, and nothing is written twice."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from vexpert import checkout
from vexpert.bench.engine import files

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("bench/*.py"))
SHARED = {
    name
    for module in (files, checkout)
    for name, value in vars(module).items()
    if getattr(value, "__module__", None) == module.__name__
}


def test_shared_names_are_found() -> None:
    assert {"write_model", "write_adapter", "write_tokenizer", "link_adapter"} < SHARED
    assert "commit" in SHARED
    assert len(SCRIPTS) > 5


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_uses_what_the_package_has(script: Path) -> None:
    tree = ast.parse(script.read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert not own & SHARED
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            other = ROOT / "bench" / f"{node.module}.py"
            if other in SCRIPTS:  # what is its own, not what it has from the package
                there = {getattr(part, "name", None) for part in ast.parse(other.read_text()).body}
                assert {alias.name for alias in node.names} <= there - SHARED
            if node.module.startswith("vexpert"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or find_spec(name), name
