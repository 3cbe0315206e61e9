"""One LLM and many threads: calls take turns, adapters come and go, Ctrl-C frees the turn."""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from helpers_engine import greedy, llm_left_idle
from helpers_wait import wait_for

from vexpert.demo import adapter_paths
from vexpert.engine import turns
from vexpert.engine.llm import LLM
from vexpert.engine.turns import Turns
from vexpert.errors import RequestError, UnsupportedError

WORDS = ("hello", "planet", "window")


@pytest.fixture
def llm() -> Iterator[LLM]:
    yield from llm_left_idle()


def run_all(calls: list[Callable[[], object]]) -> list[object]:
    """Run every call on a thread of its own; their results or errors."""
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  (compared by the test)
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call waits for ever"
    return results


def test_every_thread_gets_its_own_answers() -> None:
    """The demo, whose kernels and tokenizer are the real ones."""
    llm, paths = LLM(dtype="float32", device="cpu"), adapter_paths()
    names = ["upper", "sort", "shift", None]
    for name in names[:3]:
        llm.load_adapter(str(name), str(paths[str(name)]))

    def chat(name: str | None) -> list[str]:
        words = [[{"role": "user", "content": word}] for word in WORDS]
        return [output.outputs[0].text for output in llm.chat(words, greedy(8), adapter=name)]

    expected = {name: chat(name) for name in names}
    assert len({tuple(texts) for texts in expected.values()}) == 4
    calls = [lambda name=name: [chat(name) for _ in range(3)] for name in names * 2]
    assert run_all(calls) == [[expected[name]] * 3 for name in names * 2]
    llm.engine.check_integrity()


def test_a_refused_call_among_others_harms_none(llm: LLM) -> None:
    good = llm.generate(["a", "b"], greedy(5), adapter="red")
    texts = [output.outputs[0].text for output in good]

    def ask() -> list[str]:
        outputs = llm.generate(["a", "b"], greedy(5), adapter="red")
        return [output.outputs[0].text for output in outputs]

    def bad() -> object:
        return llm.generate(["a", {"prompt_token_ids": []}], greedy(5))

    results = run_all([ask, bad] * 6)
    assert results[::2] == [texts] * 6
    assert all(isinstance(error, RequestError) for error in results[1::2])


def interrupt_main(llm: LLM) -> None:
    """Ctrl-C, which the system gives to the main thread, until it has its effect.

    One that comes just before the thread begins to wait does not wake it.
    """
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(20):
        signal.pthread_kill(main, signal.SIGINT)
        for _ in range(100):
            if main not in llm._turns._queue:
                return
            time.sleep(0.01)


class Held:
    """An LLM whose steps wait while it is held."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.inside = threading.Event(), threading.Event()
        step = llm.engine.step

        def wait() -> list:
            self.inside.set()
            assert self.go.wait(60)
            return step()

        monkeypatch.setattr(llm.engine, "step", wait)


def test_adapters_come_and_go_while_a_call_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(llm, monkeypatch)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.extend(llm.generate("a", greedy(3))))
    thread.start()
    assert held.inside.wait(60)
    llm.load_adapter("pink", "pink")
    assert "pink" in {info.name for info in llm.adapters()}
    llm.unload_adapter("pink")
    assert not done
    held.go.set()
    thread.join(60)
    assert len(done) == 1


def test_ctrl_c_ends_a_call_and_the_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(llm, monkeypatch)
    texts: list[str] = []
    other = threading.Thread(
        target=lambda: texts.append(llm.generate("b", greedy(3))[0].outputs[0].text)
    )

    def interrupt() -> None:
        assert held.inside.wait(60)
        other.start()
        wait_for(lambda: len(llm._turns._queue) == 2)
        interrupt_main(llm)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(9), adapter="red")
    held.go.set()
    killer.join(60)
    other.join(60)
    assert texts == [llm.generate("b", greedy(3))[0].outputs[0].text]


def test_ctrl_c_ends_the_wait_for_a_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(llm, monkeypatch)
    first = threading.Thread(target=lambda: llm.generate("b", greedy(3)))
    first.start()
    assert held.inside.wait(60)

    def interrupt() -> None:
        wait_for(lambda: len(llm._turns._queue) == 2)
        interrupt_main(llm)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", greedy(3))
    killer.join(60)
    assert list(llm._turns._queue) == [first.ident]
    held.go.set()
    first.join(60)
    assert llm.generate("a", greedy(3))[0].finished


def test_a_call_within_a_call_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: object) -> None:
        llm.generate("inner", greedy(2))

    step, steps = llm.engine.step, iter([False, True])

    def once() -> list:
        if next(steps, False):
            signal.raise_signal(signal.SIGUSR1)
        return step()

    monkeypatch.setattr(llm.engine, "step", once)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(UnsupportedError, match=r"within LLM\.generate or LLM\.chat, on"):
            llm.generate("outer", greedy(5))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert llm.generate("a", greedy(3))[0].finished


def test_turns_are_in_order_of_arrival() -> None:
    turns, order, go = Turns("it"), [], threading.Event()
    threads = [threading.Thread(target=lambda: turns.run(lambda: go.wait(60)))]
    threads[0].start()
    for number in range(8):
        wait_for(lambda number=number: len(turns._queue) == number + 1)
        call = lambda number=number: turns.run(lambda: order.append(number))  # noqa: E731
        threads.append(threading.Thread(target=call))
        threads[-1].start()
    wait_for(lambda: len(turns._queue) == 9)
    go.set()
    for thread in threads:
        thread.join(60)
    assert order == list(range(8))
    assert not turns._queue


def interrupted_at(place: int, call: Callable[[], object]) -> bool:
    """Call with Ctrl-C before one step of the interpreter in turns.py; whether there is one."""
    steps = itertools.count()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != turns.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == place:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at this when `trace` is set
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def is_interrupted_well(place: int) -> bool:
    """With a thread behind, that waits, and one that comes later; whether it was interrupted."""
    queue, others = Turns("a call"), list[threading.Thread]()

    def start() -> None:
        others.append(threading.Thread(target=queue.run, args=(int,), daemon=True))
        others[-1].start()

    def call() -> None:
        start()
        wait_for(lambda: len(queue._queue) == 2)

    was_interrupted = interrupted_at(place, lambda: queue.run(call))
    start()
    for thread in others:
        thread.join(30)
        assert not thread.is_alive(), f"a call waits for ever: Ctrl-C before step {place}"
    return was_interrupted


def test_ctrl_c_at_any_moment_keeps_no_turn() -> None:
    places = itertools.takewhile(is_interrupted_well, itertools.count())
    assert len(list(places)) > 20
