"""Blocks: counts, eviction order, and digests that tell adapters, versions and prefixes apart."""

import pytest
from helpers_engine import greedy, make_engine, manager_of, run_all, run_one
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vexpert.engine.block_pool import BlockPool, chain_digest, root_digest
from vexpert.lora.types import AdapterRef


def test_digests_tell_everything_apart() -> None:
    roots = [None, AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 1), AdapterRef("1 a", 1)]
    digests = {root_digest(adapter) for adapter in roots}
    assert len(digests) == len(roots)
    root = root_digest(None)
    first = chain_digest(root, [1, 2])
    assert len({chain_digest(root, [2, 1]), first, chain_digest(first, [1, 2])}) == 3


def test_a_prefix_outlives_what_follows_it() -> None:
    pool = BlockPool(3, 1)
    digests = [bytes([i]) * 16 for i in range(3)]
    blocks = [pool.allocate() for _ in range(3)]
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.match(digests) == blocks
    assert pool.allocate() == blocks[2]
    assert pool.match(digests) == blocks[:2]
    pool.share(blocks[:1])
    assert pool.allocate() == blocks[1]
    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="available"):
        pool.allocate()
    pool.check_integrity([[blocks[0]], [blocks[1]], [blocks[2]]])


def test_check_integrity_sees_a_lost_block_and_a_wrong_count() -> None:
    pool = BlockPool(2, 1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    pool.check_integrity([[block]])
    pool._free.clear()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity([[block]])


class PoolMachine(RuleBasedStateMachine):
    """Sequences of a two-letter alphabet come, grow and go; a model knows what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 1)
        self.tables: list[list[int]] = []
        self.chains: list[list[bytes]] = []
        self.holds: dict[int, bytes] = {}

    @rule(letters=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def start(self, letters: list[int]) -> None:
        digest, chain = root_digest(None), []
        for letter in letters:
            digest = chain_digest(digest, [letter])
            chain.append(digest)
        cached = self.pool.match(chain)
        assert [self.holds[block] for block in cached] == chain[: len(cached)]
        new = len(chain) - len(cached)
        if self.pool.num_available - self.pool.num_idle(cached) < new:
            return
        self.pool.share(cached)
        table = cached + [self.pool.allocate() for _ in range(new)]
        for block, key in zip(table, chain, strict=True):
            self.holds[block] = key
            self.pool.publish(block, key)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestPool = PoolMachine.TestCase


PROMPT = list(range(2, 15))  # three full blocks and one token


def cached_tokens(names: list[str | None], reload: bool = False) -> list[int]:
    engine = make_engine()
    counts = []
    for name in names:
        counts.append(run_one(engine, PROMPT, greedy(1), name).num_cached_tokens)
        if reload:
            engine.load_adapter("red", "another red", load_inplace=True)
    return counts


def test_a_prefix_is_shared_within_one_adapter_only() -> None:
    assert cached_tokens([None, None, "red", "red", "green", "red", None]) == [
        *(0, 12, 0, 12, 0, 12, 12)
    ]


def test_a_prefix_is_not_shared_between_versions() -> None:
    assert cached_tokens(["red", "red"], reload=True) == [0, 0]


def test_a_running_request_keeps_its_version_and_a_new_one_takes_the_next() -> None:
    engine = make_engine()
    old = run_one(engine, PROMPT, greedy(9), "red").outputs[0].token_ids
    engine.add_request("old", None, PROMPT, greedy(9), "red")
    engine.step()
    engine.load_adapter("red", "another red", load_inplace=True)
    engine.add_request("new", None, PROMPT, greedy(9), "red")
    done = run_all(engine)
    fresh = make_engine()
    fresh.load_adapter("red", "another red", load_inplace=True)
    assert done["old"].outputs[0].token_ids == old
    new = done["new"].outputs[0].token_ids
    assert new == run_one(fresh, PROMPT, greedy(9), "red").outputs[0].token_ids != old


def test_unload_lets_running_requests_finish() -> None:
    engine = make_engine()
    expected = run_one(engine, PROMPT, greedy(9), "red").outputs[0].token_ids
    engine.add_request("last", None, PROMPT, greedy(9), "red")
    engine.step()
    engine.unload_adapter("red")
    assert run_all(engine)["last"].outputs[0].token_ids == expected
    assert "red" not in manager_of(engine).current
