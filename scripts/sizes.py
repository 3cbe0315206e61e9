"""Prints how large the files and functions of vexpert are: `python scripts/sizes.py`."""

import ast
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_ARGUMENTS = 500, 45, 10  # those above are counted


@dataclass(frozen=True)
class Function:
    """One `def`, methods and functions inside functions among them."""

    place: str  # path from the root, and name
    lines: int  # from `def` to its end: docstring in, decorators out
    arguments: int  # all kinds; self, *args and **kwargs left out
    is_kernel: bool  # compiled by Triton


@dataclass(frozen=True)
class Sizes:
    """What was found, in order of path."""

    files: dict[str, int]  # lines by path from the root
    functions: list[Function]


def p95(values: Sequence[int]) -> int:
    """The smallest value that at least 95% of `values` do not exceed."""
    return sorted(values)[-(-95 * len(values) // 100) - 1]


def measure(folder: Path) -> Sizes:
    """Sizes of every Python file under `folder`, which lies in the repository."""
    files, functions = {}, []
    for path in sorted(folder.rglob("*.py")):
        name, source = str(path.relative_to(ROOT)), path.read_text()
        files[name] = len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(_function(name, node))
    return Sizes(files, functions)


def _function(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    assert node.end_lineno is not None
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    is_kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    lines = node.end_lineno - node.lineno + 1
    return Function(f"{file}: {node.name}", lines, len(names) - ("self" in names), is_kernel)


def _line(what: str, values: Sequence[int]) -> str:
    middle = statistics.median(values)
    return f"{what}: {len(values)}, median {middle:g}, p95 {p95(values)}, longest {max(values)}"


def report(sizes: Sizes) -> str:
    """The figures, and those above the limits by name."""
    functions, kernels = sizes.functions, [each for each in sizes.functions if each.is_kernel]
    long = [each for each in functions if each.lines > MOST_FUNCTION_LINES]
    wide = [each for each in functions if each.arguments > MOST_ARGUMENTS]
    lines = [
        _line("lines of files", list(sizes.files.values())),
        _line("lines of functions", [each.lines for each in functions]),
        _line("lines of Triton functions", [each.lines for each in kernels]),
        f"functions over {MOST_FUNCTION_LINES} lines: {_split(long)}",
        f"functions over {MOST_ARGUMENTS} arguments: {_split(wide)}",
        f"files over {MOST_FILE_LINES} lines:",
        *(f"  {n} {name}" for name, n in sizes.files.items() if n > MOST_FILE_LINES),
        "longest functions:",
        *(f"  {f.lines} {f.place}" for f in sorted(long, key=lambda f: -f.lines)[:5]),
        "most arguments:",
        *(f"  {f.arguments} {f.place}" for f in sorted(wide, key=lambda f: -f.arguments)[:5]),
    ]
    return "\n".join(lines)


def _split(functions: Sequence[Function]) -> str:
    kernels = sum(each.is_kernel for each in functions)
    return f"{len(functions)}, {kernels} of them Triton's"


if __name__ == "__main__":
    print(report(measure(ROOT / "vexpert")))
