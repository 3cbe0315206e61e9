"""Every function and class of the package is used by the package: nothing waits for tests alone."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import vexpert

ROOT = Path(vexpert.__file__).parent
BENCH = ROOT.parent / "bench"
# Called by name, or by those outside whom we plug into.
CALLED = {
    "get_tokenizer": "Python API, as vLLM's",
    "_on_abort": "messages of the engine's loop",
    "_on_add": "messages of the engine's loop",
    "_on_call": "messages of the engine's loop",
    "connection_made": "asyncio",
    "connection_lost": "asyncio",
    "send_400_response": "uvicorn",
    "get_mask_sizes": "transformers' cache",
    "get_query_offset": "transformers' cache",
    "get_seq_length": "transformers' cache",
}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(source: str) -> list[str]:
    """Names that a module defines and that nobody else may call for it: decorated ones are
    registered, those of two underscores are Python's, references are what tests compare with.
    """
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Definition)]
    return [
        node.name
        for node in nodes
        if not (node.decorator_list or node.name.startswith(("__", "visit_", "reference_")))
    ]


def unused(sources: Iterable[str], others: Iterable[str] = ()) -> set[str]:
    """Names of `sources` that occur there, and in `others`, nowhere but where they are defined."""
    words = Counter(word for text in (*sources, *others) for word in re.findall(r"\w+", text))
    defined = Counter(name for source in sources for name in definitions(source))
    return {name for name, count in defined.items() if words[name] <= count}


def test_nothing_is_defined_for_tests_alone() -> None:
    sources = [path.read_text() for path in ROOT.rglob("*.py")]
    bench = [path.read_text() for path in BENCH.glob("*.py")]
    found = unused(sources, bench)
    assert found <= set(CALLED), f"used by tests at most: {sorted(found - set(CALLED))}"
    assert set(CALLED) <= unused(sources), "an entry of CALLED is called by name now: take it out"


def test_a_planted_one_is_seen() -> None:
    used = "def used():\n    pass\n\nclass A:\n    def lost(self):\n        return used()\n"
    assert unused([used, "A()"]) == {"lost"}
    assert unused([used, "A()"], ["A().lost()"]) == set()
    assert unused(["@route\ndef handler():\n    pass\n"]) == set()
