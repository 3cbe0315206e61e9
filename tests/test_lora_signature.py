"""A step's signature: what the host decides by, from the tables of its slots."""

import pytest
import torch
from helpers_adapters import adapter, tiny_targets

from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.tables import COUNTS, count_class
from vexpert.lora.types import LoraSignature

TARGETS = tiny_targets(max_rank=64)
SITE = {site.name: site.index for site in TARGETS.sites}


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool(TARGETS, 6, 1 << 22, torch.device("cpu"), torch.float32)


def put(pool: SlotPool, seed: int, rank: int, *paths: str) -> int:
    return pool.install(pack(adapter(TARGETS, seed, rank, paths), TARGETS, torch.float32))


def rank_at(signature: LoraSignature, site: str) -> int:
    return signature.ranks[SITE[site]]


def test_ranks_are_rounded_up_and_sites_without_an_adapter_are_zero(pool: SlotPool) -> None:
    small, large = put(pool, 0, 3, "q"), put(pool, 1, 17, "q", "router")
    alone, both = pool.signature((small,)), pool.signature((small, large))
    assert (rank_at(alone, "q"), rank_at(alone, "router")) == (16, 0)
    assert (rank_at(both, "q"), rank_at(both, "router"), rank_at(both, "head")) == (32, 32, 0)
    assert (alone.adapters, both.adapters) == (1, 2)


def test_adapters_of_one_shape_have_one_signature_whatever_their_slots(pool: SlotPool) -> None:
    slots = [put(pool, seed, rank) for seed, rank in ((0, 4), (1, 5), (2, 16))]
    one, two, three = (pool.signature((slot,)) for slot in slots)
    assert one == two
    assert hash(one) == hash(two)
    assert rank_at(three, "q") == rank_at(one, "q") == 16
    assert pool.signature((slots[0], slots[1])) == pool.signature((slots[1], slots[0]))


def test_every_active_rank_is_within_its_bound(pool: SlotPool) -> None:
    slots = [put(pool, seed, 1 + 7 * seed) for seed in range(5)]
    for active in ((slots[0],), (slots[4],), tuple(slots[1:3]), tuple(slots)):
        signature = pool.signature(active)
        for site, table in enumerate(pool.tables):
            most = max(table.host_rank[slot] for slot in active)
            assert most <= signature.ranks[site] < most + 16
            assert signature.ranks[site] % 16 == 0
        assert signature.adapters >= len(active)


def test_a_slot_that_changes_its_adapter_changes_its_signature(pool: SlotPool) -> None:
    slot = put(pool, 0, 3, "q")
    before = pool.signature((slot,))
    assert pool.signature((slot,)) is before  # remembered
    pool.remove(slot)
    assert put(pool, 1, 20, "router") == slot
    after = pool.signature((slot,))
    assert (rank_at(after, "q"), rank_at(after, "router")) == (0, 32)
    pool.check_integrity()
    pool._tables._ranks[SITE["q"], slot] = 1
    with pytest.raises(AssertionError, match="rank matrix"):
        pool.check_integrity()


def test_counts_round_up_to_their_class() -> None:
    assert [count_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 32, 33)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        32,
        32,
        128,
    ]
    assert count_class(COUNTS[-1] + 1) == COUNTS[-1] + 1
