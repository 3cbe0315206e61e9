"""Constraints that take long hold up neither others nor each other once nobody waits."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers_wait import wait_for

from vexpert import SamplingParams
from vexpert.engine import grammar_probe
from vexpert.engine.grammar import Grammars
from vexpert.engine.grammar_probe import Probe, needs_probe
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.errors import RequestError
from vexpert.server import constraints
from vexpert.server.constraints import Constraints
from vexpert.server.progress import OverloadedError
from vexpert.server.wire import params_fields


class SlowEngine:
    """Compiles expressions until it may end, and choices at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.looks = 0  # at whether somebody waits for what it compiles
        self.may_end = threading.Event()

    def is_quick(self, params: SamplingParams) -> bool:
        if params.constraint is not None and params.constraint.text == "broken":
            raise KeyError("planted")
        return params.constraint is None or params.constraint.kind == "choice"

    def prepare(self, params: SamplingParams, is_wanted: Callable[[], bool]) -> None:
        assert params.constraint is not None
        self.begun.append(params.constraint.text)
        while not (self.is_quick(params) or self.may_end.is_set()) and is_wanted():
            self.looks += 1
            time.sleep(0.001)
        self.ended.append(params.constraint.text)


class Asked:
    """Jobs and what was replied to each, by key."""

    def __init__(self) -> None:
        self.engine = SlowEngine()
        self.constraints = Constraints(self._reply)
        self.replies: dict[int, Exception | None] = {}

    def _reply(self, call: int, method: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.replies[call] = error
        else:
            self.replies[call] = None

    def ask(self, key: int, **kind: Any) -> None:
        fields = params_fields(SamplingParams(structured_outputs=kind))
        self.constraints.submit(self.engine, key, fields, key)  # type: ignore[arg-type]


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.engine.may_end.set()
    made.constraints.close()


def test_who_leaves_holds_up_nobody(asked: Asked) -> None:
    asked.ask(0, regex="slow0")
    wait_for(lambda: asked.engine.begun == ["slow0"])
    for key in range(1, 5):
        asked.ask(key, regex=f"slow{key}")
    asked.ask(5, choice=["a"])
    wait_for(lambda: 5 in asked.replies)  # a choice waits for none of them
    assert asked.engine.begun[0] == "slow0"
    assert len(asked.engine.begun) == 2
    wait_for(lambda: len(asked.constraints._waiting) == 5)
    for key in range(4):
        asked.constraints.drop(key)
    wait_for(lambda: asked.engine.begun[-1] == "slow4")
    assert len(asked.engine.begun) == 3  # those that waited never began
    asked.engine.may_end.set()
    wait_for(lambda: 4 in asked.replies)
    wait_for(lambda: not asked.constraints._wanted)


def test_what_others_wait_for_goes_on(asked: Asked) -> None:
    asked.ask(0, regex="same")
    asked.ask(1, regex="same")
    wait_for(lambda: len(asked.engine.begun) == 1 and len(asked.constraints._waiting) == 2)
    asked.constraints.drop(0)
    looks = asked.engine.looks
    wait_for(lambda: asked.engine.looks > looks + 2)
    assert not asked.engine.ended
    asked.engine.may_end.set()
    wait_for(lambda: 1 in asked.replies)


def test_a_full_queue_refuses_what_is_new(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "MAX_WAITING", 2)
    asked.ask(0, regex="slow0")
    asked.ask(1, regex="slow1")
    wait_for(lambda: len(asked.constraints._waiting) == 2)
    asked.ask(2, regex="slow1")  # the same as one that waits
    wait_for(lambda: len(asked.constraints._waiting) == 3)
    asked.ask(3, regex="slow3")
    wait_for(lambda: 3 in asked.replies)
    assert isinstance(asked.replies[3], OverloadedError)


def test_an_error_reaches_its_caller(asked: Asked) -> None:
    asked.ask(0, regex="broken")
    wait_for(lambda: 0 in asked.replies)
    assert isinstance(asked.replies[0], KeyError)


def wide(count: int) -> StructuredOutputs:
    """Compiling it takes time with the square of `count`."""
    properties = {f"{i:x}": {"type": "null"} for i in range(count)}
    schema = {"type": "object", "properties": properties, "minProperties": count // 2}
    return StructuredOutputs(json=schema)


def test_only_what_is_small_is_compiled_without_a_trial() -> None:
    """In the engine's own process nothing can end a compilation."""
    pytest.importorskip("xgrammar")
    short = {"type": "string", "maxLength": 5000}
    ordinary = {
        "type": "object",
        "properties": {f"n{i}": {"type": "string"} for i in range(50)},
    }
    fields = {"type": "object", "properties": {"a": short, "b": short}}
    kept: list[dict[str, Any]] = [
        {"json": ordinary},
        {"json": fields},
        {"json_object": True},
        {"choice": [f"choice {i}" for i in range(500)]},
        {"regex": "[a-z]{3,20}@[a-z]+"},
    ]
    for kind in kept:
        assert not needs_probe(StructuredOutputs(**kind)), kind
    tried: list[dict[str, Any]] = [
        {"json": {"type": "string", "pattern": "^.{0,5000}$"}},
        {"json": {"type": "string", "pattern": "^(a{20}b){20}$"}},
        {"json": {"type": "integer", "multipleOf": 1000}},
        {"json": {"enum": [f"value number {i}" for i in range(2000)]}},
        {"choice": [f"choice {i}" for i in range(3000)]},
        {"regex": "((a|b){30}c){30}"},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": {"type": "structural_tag"}},
    ]
    for kind in tried:
        assert needs_probe(StructuredOutputs(**kind)), kind
    assert needs_probe(wide(100))


def test_a_wide_schema_is_bounded_and_holds_up_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr("vexpert.engine.grammar_probe.SECONDS", 1)
    pieces = [bytes([code]) for code in range(32, 127)] + [b""]
    monkeypatch.setattr("vexpert.engine.grammar.token_bytes", lambda *_: pieces)
    grammars = Grammars(None, len(pieces), (95,))
    assert not grammars.is_quick(wide(300))
    with pytest.raises(RequestError, match="takes more than 1 seconds"):
        grammars.compile(wide(300))
    monkeypatch.setattr("vexpert.engine.grammar_probe.SECONDS", 60)
    monkeypatch.setattr("vexpert.engine.grammar.QUICK_SECONDS", 60.0)  # by the clock
    assert grammars.is_quick(StructuredOutputs(choice=["a", "b"]))
    once = StructuredOutputs(grammar='root ::= "a"')
    assert not grammars.is_quick(once)
    assert grammars.compile(once) is grammars.compile(once)
    assert grammars.is_quick(once)


def test_what_the_compiler_would_leave_aside_is_refused() -> None:
    """It tells so by a line on stderr, which no log should hold."""
    pytest.importorskip("xgrammar")
    probe = Probe([bytes([code]) for code in range(32, 127)] + [b""], (95,))
    schema = {"type": "number", "multipleOf": 0.1}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(RequestError, match="ignoring multipleOf"):
        probe.check(StructuredOutputs(structural_tag=tag))
    probe.check(StructuredOutputs(grammar='root ::= "a"'))


def test_a_trial_ends_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(grammar_probe, "SECONDS", 60)
    probe = Probe([bytes([code]) for code in range(32, 127)] + [b""], (95,))
    probe.check(StructuredOutputs(regex="a"))  # it has started
    slow = StructuredOutputs(regex="((a?b?c?d?e?f?g?h?){1,400}x){1,20}")
    looks: list[bool] = []

    def is_wanted() -> bool:
        looks.append(len(looks) < 3)
        return looks[-1]

    with pytest.raises(RequestError, match="nobody waits"):
        probe.check(slow, is_wanted)
    # Before it begins, amid it until nobody waits, and once more for the reason.
    assert looks == [True, True, True, False, False]


def test_where_no_thread_can_be_started_the_caller_is_told(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the thread that hears the engine's commands, which would hear no more of them."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        asked.ask(0, choice=["a"])
    asked.ask(1, choice=["b"])
    wait_for(lambda: asked.replies.get(1, asked) is None)
    with monkeypatch.context() as patched:  # there is one that sorts, and none that compiles
        patched.setattr(threading.Thread, "start", no_thread)
        asked.ask(2, regex="slow")
        wait_for(lambda: 2 in asked.replies)
    for key in (0, 2):
        assert isinstance(asked.replies[key], OverloadedError)
        assert "can't start new thread; try again later" in str(asked.replies[key])
    assert not asked.constraints._wanted
    assert not asked.constraints._waiting
