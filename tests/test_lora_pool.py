"""Arena and slot pool under random use: nothing overlaps, nothing leaks, nothing stale is seen."""

import itertools
from collections.abc import Callable

import pytest
import torch
from helpers_adapters import adapter, canonical_delta, stored_delta, tiny_targets
from helpers_slots import Slots
from hypothesis import given, settings
from hypothesis import strategies as st

from vexpert.lora.arena import Allocator, Arena
from vexpert.lora.pack import align_up, pack, start_alignment
from vexpert.lora.pool import SlotPool

CPU = torch.device("cpu")
TARGETS = tiny_targets()
KINDS = {
    seed: adapter(TARGETS, seed, rank, paths, kind)
    for seed, (rank, paths, kind) in enumerate(
        [
            (1, ("q",), "fused"),
            (8, (), "separate"),
            (4, (), "fused"),
            (2, ("experts", "router"), "outer"),
            (3, ("embed", "head", "ungated"), "down"),
        ]
    )
}
ALIGNMENT = 4 * start_alignment(TARGETS, CPU, torch.float32)
PACKED = {seed: pack(weights, TARGETS, torch.float32) for seed, weights in KINDS.items()}


def make_pool(num_slots: int, nbytes: int) -> SlotPool:
    return SlotPool(TARGETS, num_slots, nbytes, CPU, torch.float32)


def taken(seed: int) -> int:
    """Bytes of the arena that an adapter takes."""
    return align_up(PACKED[seed].nbytes, ALIGNMENT)


def assert_slot_is(pool: SlotPool, slot: int, seed: int) -> None:
    """The slot's deltas are those of KINDS[seed] at every site."""
    for site in TARGETS.sites:
        expected = canonical_delta(TARGETS, KINDS[seed], site)
        for expert in {0, site.num_experts - 1}:
            got = stored_delta(site, pool.tables[site.index], slot, expert)
            torch.testing.assert_close(got, expected[expert], atol=1e-4, rtol=1e-5)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30)), max_size=60),
    st.sampled_from([1, 4, 8]),
)
@settings(max_examples=150, deadline=None)
def test_allocator_keeps_blocks_apart_and_bytes_exact(
    actions: list[tuple[bool, int, int]], alignment: int
) -> None:
    allocator = Allocator(203, alignment)
    live: list[int] = []
    for allocate, size, which in actions:
        if allocate:
            largest = max((room for _, room in allocator.holes), default=0)
            start = allocator.allocate(size)
            assert (start is not None) == (allocator.rounded(size) <= largest)
            if start is not None:
                assert start % alignment == 0
                live.append(start)
        elif live:
            allocator.free(live.pop(which % len(live)))
        elif allocator.holes and allocator.free_total >= allocator.rounded(size):
            gather(allocator, size)
        allocator.check_integrity()
        assert sorted(allocator.blocks) == sorted(live)
    for start in live:
        allocator.free(start)
    assert allocator.holes == [(0, allocator.capacity)]


@pytest.mark.parametrize("fault", ["overlap", "gap", "unmerged", "lost"])
def test_integrity_check_sees_planted_faults(fault: str) -> None:
    allocator = Allocator(64, 4)
    first, second = allocator.allocate(8), allocator.allocate(8)
    assert (first, second) == (0, 8)
    allocator.check_integrity()
    if fault == "overlap":
        allocator.blocks[0] = 12
    elif fault == "gap":
        del allocator.blocks[0]
    elif fault == "unmerged":
        allocator.holes = [(16, 8), (24, 40)]
    else:
        allocator.holes = [(16, 40)]
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def gather(allocator: Allocator, size: int) -> int:
    """Move until one hole holds `size`; the elements moved."""
    moved = 0
    while max(room for _, room in allocator.holes) < allocator.rounded(size):
        move = allocator.next_move(size)
        assert move is not None
        allocator.relocate(move)
        allocator.check_integrity()
        moved += move.size
    return moved


def cheapest(allocator: Allocator, size: int) -> int:
    """Fewest elements to slide so that neighbouring holes hold `size`: every window tried."""
    best = allocator.capacity
    for i, (begin, _) in enumerate(allocator.holes):
        room = 0
        for start, hole in allocator.holes[i:]:
            room += hole
            if room >= size:
                best = min(best, start + hole - begin - room)
    return best


@given(st.lists(st.integers(1, 9), min_size=3, max_size=20), st.data())
@settings(max_examples=200, deadline=None)
def test_moves_make_one_hole_at_the_least_cost(sizes: list[int], data: st.DataObject) -> None:
    allocator = Allocator(sum(sizes) + 3, 1)
    starts = [allocator.allocate(size) for size in sizes]
    freed = data.draw(st.sets(st.sampled_from(starts), min_size=1))
    for start in freed:
        assert start is not None
        allocator.free(start)
    size = data.draw(st.integers(1, allocator.free_total))
    expected = cheapest(allocator, size)
    assert gather(allocator, size) == expected
    assert allocator.allocate(size) is not None
    allocator.check_integrity()


@pytest.mark.parametrize("good", range(4))
def test_a_move_that_finds_no_memory_leaves_the_block_whole(
    monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """After `good` calls that do: the adapter that slides is another than the one that comes."""
    monkeypatch.setattr("vexpert.lora.arena.CPU_MOVE_ELEMENTS", 8)  # the hole has 4
    arena = Arena(28 * 4, CPU, torch.float32, alignment=4)
    arena.allocator.allocate(4)
    arena.allocator.allocate(20)
    arena.span(4, 20).copy_(torch.arange(20.0))
    arena.allocator.free(0)
    move = arena.allocator.next_move(8)
    assert move is not None
    calls = itertools.count()

    def scarce(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: object) -> torch.Tensor:
            if next(calls) >= good:
                raise torch.OutOfMemoryError("out of memory")
            return real(*arguments)

        return call

    monkeypatch.setattr(torch.Tensor, "clone", scarce(torch.Tensor.clone))
    monkeypatch.setattr(torch, "empty_like", scarce(torch.empty_like))
    try:
        arena.move(move)
    except torch.OutOfMemoryError:
        assert arena.allocator.blocks == {4: 20}
    (start,) = arena.allocator.blocks
    assert torch.equal(arena.span(start, 20), torch.arange(20.0))
    arena.allocator.check_integrity()


def test_moves_carry_overlapping_blocks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vexpert.lora.arena.CPU_MOVE_ELEMENTS", 3)
    arena = Arena(28 * 4, CPU, torch.float32, alignment=4)
    small, large = arena.allocator.allocate(4), arena.allocator.allocate(20)
    assert small is not None
    assert large is not None
    arena.span(large, 20).copy_(torch.arange(20.0))
    arena.allocator.free(small)
    move = arena.allocator.next_move(8)
    assert move is not None
    assert (move.source, move.target) == (4, 0)
    arena.move(move)
    torch.testing.assert_close(arena.buffer[:20], torch.arange(20.0))
    assert arena.allocator.next_move(9) is None


class Model:
    """What the pool should hold: a plain account of the same actions."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool, self.slots = pool, Slots(pool)
        self.seed: dict[int, int] = {}
        self.uses: dict[int, int] = {}

    def install(self, seed: int) -> None:
        packed = PACKED[seed]
        before = dict(self.seed)
        evicted = self.slots.victims(packed.nbytes)
        used = [slot for slot in before if self.uses[slot]]
        used_bytes = sum(taken(before[slot]) for slot in used)
        possible = len(used) < self.pool.num_slots
        possible &= used_bytes + taken(seed) <= self.pool.arena.nbytes
        assert (evicted is not None) == possible
        for slot in evicted or ():
            assert not self.uses.pop(slot)
            del self.seed[slot]
        if evicted is not None:
            slot = self.slots.put(packed)
            assert slot not in self.seed
            self.seed[slot], self.uses[slot] = seed, 0

    def act(self, action: str, number: int) -> None:
        if action == "install":
            self.install(number % len(PACKED))
        elif self.seed:
            slot = sorted(self.seed)[number % len(self.seed)]
            if action == "use":
                self.slots.policy.use(slot)
                self.uses[slot] += 1
            elif action == "unuse" and self.uses[slot]:
                self.slots.policy.unuse(slot)
                self.uses[slot] -= 1
            elif action == "remove" and not self.uses[slot]:
                self.slots.remove(slot)
                del self.seed[slot], self.uses[slot]

    def check(self) -> None:
        self.slots.check_integrity()
        used = sum(taken(seed) for seed in self.seed.values())
        assert self.pool.arena.used_bytes == used
        for slot in range(self.pool.num_slots):
            if slot in self.seed:
                assert self.pool.resident_bytes(slot) == taken(self.seed[slot])
            else:
                assert all(table.host_rank[slot] == 0 for table in self.pool.tables)


ACTIONS = st.tuples(
    st.sampled_from(["install", "install", "use", "unuse", "remove"]), st.integers(0, 9)
)


@given(st.lists(ACTIONS, max_size=25), st.integers(1, 4), st.floats(0.5, 2.5))
@settings(max_examples=60, deadline=None)
def test_pool_under_random_use(
    actions: list[tuple[str, int]], num_slots: int, adapters: float
) -> None:
    model = Model(make_pool(num_slots, int(taken(1) * adapters)))
    for action, number in actions:
        model.act(action, number)
        model.check()
    for slot, seed in model.seed.items():
        assert_slot_is(model.pool, slot, seed)


def test_nothing_is_evicted_when_it_would_not_help() -> None:
    pool = make_pool(3, taken(1) + taken(0))
    slots = Slots(pool)
    slots.policy.use(slots.put(PACKED[0]))
    idle = slots.put(PACKED[2])
    assert slots.victims(taken(1) + 16) is None
    assert_slot_is(pool, idle, 2)


def test_compaction_keeps_every_adapter_right() -> None:
    seeds = (3, 2, 3, 4)
    pool = make_pool(6, sum(taken(seed) for seed in seeds))
    slots = [pool.install(PACKED[seed]) for seed in seeds]
    pool.remove(slots[0])
    pool.remove(slots[2])
    hole = taken(3)
    large = pack(adapter(TARGETS, 8, 2, ("experts", "q")), TARGETS, torch.float32)
    assert hole < align_up(large.nbytes, ALIGNMENT) <= 2 * hole
    assert pool.block_bytes(large.nbytes) <= pool.free_bytes
    pool.install(large)  # others move for it
    pool.check_integrity()
    assert pool.arena.used_bytes == taken(2) + taken(4) + align_up(large.nbytes, ALIGNMENT)
    assert_slot_is(pool, slots[1], 2)
    assert_slot_is(pool, slots[3], 4)


def test_a_removed_slot_and_its_successor_show_nothing_stale() -> None:
    pool = make_pool(1, 1 << 20)
    full = pool.install(PACKED[1])
    pool.remove(full)
    pool.arena.buffer.fill_(float("nan"))
    for site in TARGETS.sites:
        assert not stored_delta(site, pool.tables[site.index], full, 0).any()
    slot = pool.install(PACKED[0])  # q alone
    assert slot == full
    assert_slot_is(pool, slot, 0)
    pool.check_integrity()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_install_evict_and_compact_on_a_gpu() -> None:
    packed = {
        seed: pack(weights, TARGETS, torch.float32, pin_memory=True)
        for seed, weights in KINDS.items()
    }
    size = packed[1].nbytes + packed[4].nbytes
    pool = SlotPool(TARGETS, 3, size, torch.device("cuda"), torch.float32)
    slots = Slots(pool)
    slots.put(packed[2])
    kept = slots.put(packed[4])
    slots.policy.use(kept)
    largest = slots.put(packed[1])  # evicts slot 0, and moves what is in use
    slots.check_integrity()
    assert_slot_is(pool, kept, 4)
    assert_slot_is(pool, largest, 1)


@pytest.mark.parametrize("fault", ["rank", "offset", "host_rank", "stale"])
def test_pool_integrity_check_sees_planted_faults(fault: str) -> None:
    pool = make_pool(2, 1 << 20)
    slot = pool.install(PACKED[2])
    pool.check_integrity()
    table = pool.tables[1]
    if fault == "rank":
        table.rank[slot] += 1
    elif fault == "offset":
        table.b_offset[0, slot] += 4
    elif fault == "host_rank":
        table.host_rank[slot] = 0
    else:
        table.rank[slot + 1] = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_tables_can_be_written_outside_inference_mode() -> None:
    with torch.inference_mode():
        pool = make_pool(2, 1 << 20)
        slot = pool.install(PACKED[0])
    pool.remove(slot)
    pool.check_integrity()
