"""Decode steps on static buffers, padded and replayed: everybody gets what an eager step gives.

Here a "capture" calls its function on the buffers. What a real capture fixes, that is which kernels
run, hangs on the size and the signature alone; tests marked `gpu` replay real graphs.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers_engine import EagerCapturer, greedy, make_engine, manager_of, run_all
from helpers_graphs import WAYS_TO_SERVE
from helpers_mixed import alone, facts, random_work, together

from vexpert.engine import graphs
from vexpert.engine.engine import Engine
from vexpert.engine.graphs import DecodeGraphs, GraphKey, graph_sizes
from vexpert.lora.types import LoraSignature

PROMPT = [5, 9, 2, 30, 7, 8]


def graphs_of(engine: Engine) -> DecodeGraphs:
    found = engine._runner._graphs
    assert found is not None
    return found


def make_captured(share: float = 1.0, **options: Any) -> tuple[Engine, EagerCapturer]:
    """An engine with graphs, and what captured them. At share 1 a capture never has to wait."""
    capturer = EagerCapturer()
    engine = make_engine(capturer=capturer, **options)
    graphs_of(engine)._share = share
    return engine, capturer


@pytest.mark.parametrize("most", [1, 2, 7, 16, 17, 48, 100, 256, 300, 1000])
def test_sizes_rise_to_the_most_rows_and_waste_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows <= max(1, rows // 2)
        assert size <= rows + 63
    assert len(graph_sizes(256)) <= 36


CASES = WAYS_TO_SERVE | {"five rows": {"max_num_seqs": 5}}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_give_what_eager_ones_give(name: str) -> None:
    rng = random.Random(name)
    work = random_work(rng, 14)
    engine, capturer = make_captured(**CASES[name])
    assert together(engine, work, rng) == alone(work)
    assert capturer.replays > 20


def test_aborts_between_replays() -> None:
    rng = random.Random(1)
    work = random_work(rng, 12)
    engine, _ = make_captured(num_blocks=24)
    for number, (tokens, params, adapter) in enumerate(work):
        engine.add_request(str(number), None, tokens, params, adapter)
    last, victims = {}, ["1", "4", "7", "10"]
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
        if victims and rng.random() < 0.3:
            engine.abort(victims.pop())
    expected = alone(work)
    for number in range(12):
        if number not in (1, 4, 7, 10):
            assert facts(last[str(number)]) == expected[number]


def serve(engine: Engine, *names: str | None, tokens: int = 8) -> list[list[int]]:
    for index, name in enumerate(names):
        engine.add_request(str(index), None, [*PROMPT, index], greedy(tokens), name)
    outputs = run_all(engine)
    return [outputs[str(index)].outputs[0].token_ids for index in range(len(names))]


def test_a_graph_serves_any_adapters_in_any_slots() -> None:
    engine, capturer = make_captured()
    first = serve(engine, "red", None, "red")
    before = capturer.captures
    for names in (("blue", "blue", None), (None, "grey", "grey"), ("green", None, None)):
        assert serve(engine, *names) == serve(make_engine(), *names)
    assert serve(engine, "red", None, "red") == first
    manager_of(engine).load("red", "another red", load_inplace=True)
    assert serve(engine, "red", None, "red") != first
    assert capturer.captures == before
    assert manager_of(engine).swaps > 4


def test_base_graphs_are_captured_before_the_first_request() -> None:
    engine, capturer = make_captured(max_num_seqs=9)
    assert capturer.captures == len(graph_sizes(9))
    serve(engine, None, None, None)
    assert capturer.captures == len(graph_sizes(9))
    assert capturer.replays == 7  # the first token comes with the prompt


def test_eager_steps_between_do_not_leave_stale_rows() -> None:
    """A prompt joins and ends: the same sequences decode on, a token further than the rows say."""
    engine, _ = make_captured()
    expected = serve(make_engine(), None, None, tokens=12)
    for index in range(2):
        engine.add_request(str(index), None, [*PROMPT, index], greedy(12))
    last = {}
    for step in range(40):
        if step in (3, 5, 6):
            engine.add_request(f"one {step}", None, PROMPT[:step], greedy(1))
        last |= {output.request_id: output for output in engine.step()}
    assert [last[str(index)].outputs[0].token_ids for index in range(2)] == expected


def test_adapters_with_extras_run_eagerly() -> None:
    engine, capturer = make_captured()
    before = capturer.captures
    engine.model.lora.installed = {0: {}}
    assert serve(engine, "red", None) == serve(make_engine(), "red", None)
    assert capturer.captures == before
    assert capturer.replays == 0
    engine.model.lora.installed = {}
    serve(engine, "red", None)
    assert capturer.replays > 0


def test_lora_graphs_are_bounded_and_base_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_LORA_GRAPHS", 2)
    engine, capturer = make_captured()
    kept = graphs_of(engine)
    base = len(kept._base)
    for count in (1, 2, 3, 1, 2, 3):
        names = ["red"] * count
        assert serve(engine, *names) == serve(make_engine(), *names)
        assert len(kept._lora) <= 2
    assert [key.size for key in kept._lora] == [2, 3]
    serve(engine, "red", "red")
    assert [key.size for key in kept._lora] == [3, 2]
    assert capturer.captures == base + 6
    assert len(kept._base) == base


def test_while_a_capture_has_to_wait_a_larger_graph_or_an_eager_step_serves() -> None:
    engine, capturer = make_captured()
    expected = serve(engine, "red", None, "blue")
    before, replays = capturer.captures, capturer.replays
    graphs_of(engine)._may_capture = float("inf")
    assert serve(engine, "red", None) == expected[:2]  # in the graph of three rows
    assert capturer.captures == before
    assert capturer.replays > replays
    replays = capturer.replays
    four = serve(engine, "red", None, "blue", None)
    assert four[:3] == expected
    assert (capturer.captures, capturer.replays) == (before, replays)


def test_what_a_graph_covers() -> None:
    one = GraphKey(4, LoraSignature((16, 0, 32), 2))
    assert one.covers(one)
    assert one.covers(GraphKey(3, LoraSignature((16, 0, 16), 1)))
    for other in (
        GraphKey(5, one.lora),
        GraphKey(4, LoraSignature((16, 16, 32), 2)),
        GraphKey(4, LoraSignature((16, 0, 48), 2)),
        GraphKey(4, LoraSignature((16, 0, 32), 4)),
        GraphKey(4, None),
    ):
        assert not one.covers(other)
    assert not GraphKey(4, None).covers(one)
    assert GraphKey(4, None).covers(GraphKey(2, None))


class FailingCapturer:
    """Fails from the call `after` on."""

    def __init__(self, after: int) -> None:
        self.left = after

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        run()
        return run


@pytest.mark.parametrize("after", [0, 3, 100])
def test_a_failed_capture_turns_graphs_off_and_says_so(
    after: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(capturer=FailingCapturer(after))
    assert serve(engine, "red", None) == serve(make_engine(), "red", None)
    is_off = graphs_of(engine).is_off
    assert is_off == (after < 100)
    assert ("not permitted when stream is capturing" in caplog.text) == is_off


def test_enforce_eager_means_no_graphs() -> None:
    engine = make_engine(capturer=EagerCapturer(), enforce_eager=True)
    assert engine._runner._graphs is None
    assert make_engine()._runner._graphs is None  # a CPU without a capturer


def test_planted_rows_that_are_not_told_of_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_captured()
    rows = graphs_of(engine)._buffers.rows
    forward = rows._advance

    def wrong(n: int) -> None:
        forward(n)
        rows.arrays.cells[:] = rows._spare_cell

    monkeypatch.setattr(rows, "_advance", wrong)
    assert serve(engine, None, None) != serve(make_engine(), None, None)


def test_buffers_tell_padding_from_rows() -> None:
    engine, _ = make_captured()
    for index in range(3):
        engine.add_request(str(index), None, [*PROMPT, index], greedy(8), "red" if index else None)
    engine.step(), engine.step()
    arrays = graphs_of(engine)._buffers.rows.arrays
    assert arrays.query_starts[:6].tolist() == [0, 1, 2, 3, 3, 3]
    assert arrays.kv_lens[:4].tolist() == [8, 8, 8, 0]
    assert arrays.slots[:4].tolist() == [-1, 0, 0, -1]
    assert (arrays.cache_rows[3:] == -1).all()
    assert (arrays.cache_rows[:3] >= 0).all()
    assert np.array_equal(arrays.positions[:4], [7, 7, 7, 0])
    logits = graphs_of(engine)._buffers.logits
    assert torch.isfinite(logits[:3]).all()
