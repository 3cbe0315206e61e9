"""The messages of the package's source, with `…` where a value goes."""

import ast
import functools
from pathlib import Path

import vexpert

ROOT = Path(vexpert.__file__).parent


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return None


@functools.cache
def messages() -> list[str]:
    """Every string of the source but docstrings' layout: one line each."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (text := _text(node)) and len(text) > 10:
                found.append(" ".join(text.split()))
    return found
