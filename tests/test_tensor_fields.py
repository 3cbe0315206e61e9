"""Every tensor of a dataclass or a NamedTuple has its shape and its dtype beside it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vexpert

ROOT = Path(vexpert.__file__).parent
SHAPE = re.compile(r"\[[^\]]*\]")
DTYPE = re.compile(r"\b(u?int\d+|b?float\d+|bool|dtypes?)\b")


def is_record(node: ast.ClassDef) -> bool:
    made = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    return made or "NamedTuple" in map(ast.unparse, node.bases)


def holds_tensors(annotation: ast.expr) -> bool:
    return re.search(r"\bTensor\b", ast.unparse(annotation)) is not None


def comment_of(field: ast.AnnAssign, lines: list[str]) -> str:
    """The comment behind a field, or else the one above it."""
    own = "\n".join(lines[field.lineno - 1 : field.end_lineno])
    if "#" in own:
        return own.partition("#")[2]
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.strip().startswith("#"):
            break
        above.append(line)
    return "\n".join(reversed(above))


def entry_in(text: str, name: str) -> str:
    """From where `text` tells of `name`, up to the next line that tells of another thing."""
    match = re.search(rf"(?m)^[\s|*`-]*(?:\w+, )*`?{name}`?(?:, `?\w+`?)*\s*[|:\[].*$", text)
    return "" if match is None else match.group()


def tensor_fields(source: str) -> Iterator[tuple[str, str, str]]:
    """("Class.field", what is said of it, and of its class) of every tensor field in a module."""
    tree, lines = ast.parse(source), source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not is_record(node):
            continue
        own = ast.get_docstring(node) or ""
        text = own + "\n" + (ast.get_docstring(tree) or "")
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and holds_tensors(field.annotation):
                name = ast.unparse(field.target)
                said = comment_of(field, lines) + "\n" + entry_in(text, name)
                yield f"{node.name}.{name}", said, own


FIELDS = {
    f"{path.relative_to(ROOT)}: {name}": (said, of_class)
    for path in sorted(ROOT.rglob("*.py"))
    for name, said, of_class in tensor_fields(path.read_text())
}


def test_every_tensor_field_has_a_shape() -> None:
    assert len(FIELDS) > 140  # they are found
    assert not [name for name, (said, _) in FIELDS.items() if not SHAPE.search(said)]


def test_every_tensor_field_has_a_dtype() -> None:
    """Its own, or one told once for the whole class."""
    missing = [
        name
        for name, (said, of_class) in FIELDS.items()
        if not DTYPE.search(said) and "dtype" not in of_class
    ]
    assert not missing


EXAMPLE = '''
"""A table.

| array | what |
|---|---|
| listed, beside | [N] int32 |
| other | no shape |
"""
@dataclass(frozen=True)
class Example:
    """In the model's dtype."""

    behind: torch.Tensor  # [T, H]
    # [T] int64
    above: torch.Tensor | None = None
    listed: torch.Tensor
    beside: torch.Tensor
    other: torch.Tensor
    bare: dict[int, torch.Tensor]  # by slot
    number: int

class Row(NamedTuple):
    bare: torch.Tensor
    shaped: torch.Tensor  # [T]

class NotData:
    bare: torch.Tensor
'''


def test_what_counts_as_a_shape() -> None:
    found = {name: bool(SHAPE.search(said)) for name, said, _ in tensor_fields(EXAMPLE)}
    shaped = dict.fromkeys(("behind", "above", "listed", "beside"), True)
    expected = {**shaped, "other": False, "bare": False}
    rows = {"Row.bare": False, "Row.shaped": True}
    assert found == {f"Example.{name}": has for name, has in expected.items()} | rows
