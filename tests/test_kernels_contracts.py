"""Every launcher of a kernel states its contract, and every kernel file its formula and arrays."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import vexpert

ROOT = Path(vexpert.__file__).parent.parent
KERNELS = ROOT / "vexpert" / "kernels"
KERNEL_CALL = re.compile(r"\b_\w+_kernel\[")
DTYPE = re.compile(r"\b(u?int\d+|b?float\d*|bool|dtypes?)\b")
NAMES = r"(?:`?\w+`?(?:, | and ))*`?\w+`?"


@dataclass(frozen=True)
class Launcher:
    """A public function that launches a kernel."""

    node: ast.FunctionDef
    text: str  # its docstring, and what its file begins with, each in one line but for tables

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    def tensors(self) -> Iterator[tuple[str, int]]:
        """Parameters that are tensors, or tuples that hold so many."""
        for each in self.node.args.args:
            count = ast.unparse(each.annotation).count("Tensor") if each.annotation else 0
            if count:
                yield each.arg, count


def is_compiled(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(each) for each in node.decorator_list)


def lacks_types(node: ast.FunctionDef) -> bool:
    given = (*node.args.args, *node.args.kwonlyargs)
    own = [each for each in given if each.arg not in ("self", "cls")]
    return node.returns is None or any(each.annotation is None for each in own)


def joined(docstring: str) -> str:
    """Paragraphs in one line each: an entry may go on in the next one."""
    return re.sub(r"(?<![|\n])\n(?![|\n])", " ", docstring)


def launchers(source: str) -> dict[str, Launcher]:
    tree = ast.parse(source)
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    own = [node for node in own if not is_compiled(node)]
    text = {node.name: ast.unparse(node) for node in own}
    launch = {name for name, body in text.items() if KERNEL_CALL.search(body)}
    private = "|".join(name for name in launch if name.startswith("_"))
    if private:
        launch |= {name for name, body in text.items() if re.search(rf"\b({private})\(", body)}
    head = joined(ast.get_docstring(tree) or "")
    return {
        node.name: Launcher(node, joined(ast.get_docstring(node) or "") + "\n" + head)
        for node in own
        if node.name in launch and not node.name.startswith("_")
    }


def entries(text: str) -> dict[str, str]:
    """Name -> what is said behind the shape of every array that `text` lists."""
    found: defaultdict[str, str] = defaultdict(str)
    for names, said in re.findall(rf"({NAMES})(?: \| | )\[[^\]]*\](?=([^;|\n]*))", text):
        for name in re.findall(r"\w+", names):
            found[name] += said
    return found


def missing_entries(launcher: Launcher) -> list[str]:
    """Tensors without a shape or without a dtype; of a tuple, `name: (one, another)` says more."""
    listed = {name for name, said in entries(launcher.text).items() if DTYPE.search(said)}
    missing = []
    for name, count in launcher.tensors():
        match = re.search(rf"(?<!\w)`?{name}`?: \(?({NAMES})", launcher.text)
        members = set() if match is None else set(re.findall(r"\w+", match.group(1)))
        if name not in listed and len(members & listed) < count:
            missing.append(name)
    return missing


def references(docstring: str) -> list[str]:
    """What it is compared with: `name`, `ops.file`, `ops.file.name` or `tests/file.py: name`."""
    match = re.search(r"[Rr]eferences?: ((?:`[^`]+`(?:, | and )?)+)", joined(docstring))
    return [] if match is None else re.findall(r"`([^`]+)`", match.group(1))


def exists(reference: str, file: Path) -> bool:
    """Whether there is such a file or function; a bare name is of the same file."""
    if ROOT.joinpath("vexpert", *reference.split(".")).with_suffix(".py").exists():
        return True
    if ": " in reference:
        path, name = reference.split(": ")
        file = ROOT / path
    elif "." in reference:
        *folders, name = reference.split(".")
        file = ROOT.joinpath("vexpert", *folders).with_suffix(".py")
    else:
        name = reference
    return file.exists() and re.search(rf"(?m)^ *def {name}\(", file.read_text()) is not None


FILES = sorted(KERNELS.glob("*.py"))
LAUNCHERS = {
    f"{path.name}: {name}": launcher
    for path in FILES
    for name, launcher in launchers(path.read_text()).items()
}


def test_every_tensor_of_a_launcher_has_shape_and_dtype() -> None:
    assert len(LAUNCHERS) > 30  # they are found
    found = {f"{name}, {each}" for name, of in LAUNCHERS.items() for each in missing_entries(of)}
    assert not found, f"without shape or dtype: {sorted(found)}"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_what_changes_is_told(name: str) -> None:
    """What gives nothing back changes something in place."""
    launcher = LAUNCHERS[name]
    if launcher.node.returns is not None and ast.unparse(launcher.node.returns) == "None":
        assert "in place" in launcher.docstring


def test_every_launcher_names_its_reference() -> None:
    named = {name: references(launcher.docstring) for name, launcher in LAUNCHERS.items()}
    assert not {name for name, given in named.items() if not given}
    lost = {
        f"{name}, {each}"
        for name, given in named.items()
        for each in given
        if not exists(each, KERNELS / name.partition(":")[0])
    }
    assert not lost


def test_every_file_of_a_launcher_begins_with_formula_and_arrays() -> None:
    without = set()
    for name in {name.partition(":")[0] for name in LAUNCHERS}:
        head = ast.get_docstring(ast.parse((KERNELS / name).read_text())) or ""
        formula, _, table = head.partition("| array | shape |")
        assert table, name
        if "=" not in formula:
            without.add(name)
    assert not without


def test_only_what_triton_or_numba_compiles_is_without_types() -> None:
    """mypy lets the folder pass, for kernels cannot be typed."""
    untyped = [
        f"{path.name}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not is_compiled(node) and lacks_types(node)
    ]
    assert not untyped


EXAMPLE = '''
"""y[t] = x[t] + bias

| array | shape | holds |
|---|---|---|
| x, y | [T, W] float | rows |
| places | [T] | of no dtype |
"""

@triton.jit
def _add_kernel(x, y): ...

def _launch(x): _add_kernel[(1,)](x)

def add(x: Tensor, bias: Tensor | None, places: Tensor, both: tuple[Tensor, Tensor]) -> Tensor:
    """y, from x and bias
    [W] in x's dtype; both: (left, right), left [T] int64. Reference: `ops.reference.row_delta`."""
    _launch(x)

def other(x: Tensor) -> None:
    """Launches nothing."""

def bare(self, x): ...
'''


def test_what_counts() -> None:
    found = launchers(EXAMPLE)
    assert list(found) == ["add"]
    assert missing_entries(found["add"]) == ["places", "both"]
    assert references(found["add"].docstring) == ["ops.reference.row_delta"]
    assert exists("ops.reference", KERNELS / "any.py")
    assert exists("ops.reference.row_delta", KERNELS / "any.py")
    assert not exists("ops.reference.no_such", KERNELS / "any.py")
    assert exists("tests/test_kernels_contracts.py: launchers", KERNELS / "any.py")
    functions = [node for node in ast.parse(EXAMPLE).body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if lacks_types(node) and not is_compiled(node)] == [
        "_launch",
        "bare",
    ]
