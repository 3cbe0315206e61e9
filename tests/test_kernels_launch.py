"""Direct launches against Triton's own, with kernels compiled for an H200; needs no GPU."""

import ast
from pathlib import Path

import pytest
from helpers_process import run_helper

import vexpert.kernels

FILES = sorted(Path(vexpert.kernels.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_that_are_launched_are_launched_directly(file: Path) -> None:
    """And no others: a kernel cannot call what `direct_launch` gives."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = {f.name for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)}
    direct = {f.name for f in functions if "direct_launch" in map(ast.unparse, f.decorator_list)}
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    assert direct == launched & jitted


def test_direct_launches_are_those_of_triton() -> None:
    said = run_helper("helpers_launch.py")
    assert said.pop("binaries") > 40
    assert said == {
        "wrong": 0,
        "not direct": 4,  # on each of two devices an unknown option, and a grid to be called
        "hooked": ["plain"],
        "direct without hooks": True,
        "compiled only": True,
        "a tensor of the host": True,
        "a mistake": True,
        "new numbers": [True, True, True],
        "bounded": True,
    }
