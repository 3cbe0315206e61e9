"""A mixed batch gives every request what it gets alone, whatever the scheduler has to do."""

import random
from typing import Any

import pytest
import torch
from helpers_engine import FakeManager, greedy, make_engine, manager_of
from helpers_mixed import Work, alone, facts, random_work, together

from vexpert.engine import block_pool, request
from vexpert.lora.types import Wait

TIGHT = {"num_blocks": 18}  # one full-length sequence takes 16
CASES = {
    "roomy": {},
    "tiny chunks": {"max_num_batched_tokens": 5},
    "few blocks": TIGHT,
    "few blocks, one slot": {**TIGHT, "num_slots": 1, "max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False, "num_blocks": 20},
    "two at a time": {"max_num_seqs": 2},
    "block of one": {"block_size": 1, "num_blocks": 70},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_mixed_equals_one_by_one(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    work = random_work(rng, 12)
    engine = make_engine(**CASES[name])
    assert together(engine, work, rng) == alone(work)
    if name == "few blocks":
        assert engine.stats().preemptions > 0
    if name == "roomy":
        assert engine.stats().prefix_hit_tokens > 0
        assert manager_of(engine).swaps > 2


@pytest.mark.parametrize("seed", range(2))
def test_aborts_change_nothing_for_the_others(seed: int) -> None:
    rng = random.Random(seed)
    work = random_work(rng, 16)
    engine = make_engine(**TIGHT, max_num_batched_tokens=9)
    victims = set(rng.sample(range(16), 6))
    for number, (tokens, params, adapter) in enumerate(work):
        engine.add_request(str(number), None, tokens, params, adapter)
    last, order = {}, sorted(victims)
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
        if order and rng.random() < 0.4:
            victim = str(order.pop(0))
            done = victim in last and last[victim].finished
            assert engine.abort(victim) is not done
            assert not engine.abort(victim)
        engine.check_integrity()
    manager_of(engine).check_idle()
    expected = alone(work)
    for number in set(range(16)) - victims:
        assert facts(last[str(number)]) == expected[number]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_mixed_on_a_gpu_equals_one_by_one_on_the_cpu() -> None:
    rng = random.Random(3)
    work = random_work(rng, 12)
    engine = make_engine(device="cuda", **TIGHT)
    on_gpu, on_cpu = together(engine, work, rng), alone(work)
    for (gpu_rows, _), (cpu_rows, _) in zip(on_gpu, on_cpu, strict=True):
        assert [row[:2] for row in gpu_rows] == [row[:2] for row in cpu_rows]


def mixed_differs() -> bool:
    rng = random.Random(5)
    work = random_work(rng, 12)
    return together(make_engine(), work, rng) != alone(work)


def test_without_a_planted_error_nothing_differs() -> None:
    assert not mixed_differs()


def test_planted_blocks_shared_between_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "root_digest", lambda adapter: block_pool.root_digest(None))
    assert mixed_differs()


def test_planted_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeManager.acquire

    def wrong(self: FakeManager, ref: Any) -> int | Wait:
        slot = right(self, ref)
        return 0 if slot == 1 and 0 in self.in_slot else slot

    monkeypatch.setattr(FakeManager, "acquire", wrong)
    assert mixed_differs()


def test_planted_digest_without_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    right = block_pool.chain_digest
    monkeypatch.setattr(request, "chain_digest", lambda parent, tokens: right(b"", tokens))
    first, second = [2, 3, 4, 5, 9, 9, 9, 9, 7], [6, 6, 6, 6, 9, 9, 9, 9, 7]
    work: list[Work] = [
        (first, greedy(), None),
        (second, greedy(), None),
        (first[4:], greedy(), None),
    ]
    engine = make_engine(max_num_seqs=1)
    assert together(engine, work, random.Random(0)) != alone(work)
