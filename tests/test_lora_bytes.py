"""Memory by the byte: adapters take their own ranks and targets, not the largest."""

from random import Random

import pytest
import torch
from helpers_adapters import EXPERTS, HIDDEN, INNER, TargetBuilder
from helpers_slots import Slots

from vexpert.lora.budget import full_adapter_bytes
from vexpert.lora.pack import PackedAdapter, pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import AdapterWeights, ExpertsFactors, Factors, TargetMap

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RANKS = (4, 8, 16, 32, 64, 128, 256)


def targets(max_rank: int) -> TargetMap:
    """Two layers of attention and experts."""
    builder = TargetBuilder(max_rank)
    for layer in range(2):
        for name, out in (("q", 128), ("k", 32), ("v", 32)):
            builder.linear(f"{layer}.{name}", HIDDEN, out)
        builder.linear(f"{layer}.o", 128, HIDDEN)
        builder.experts(f"{layer}.experts")
    return builder.build()


def weights(model: TargetMap, rank: int, kind: str) -> AdapterWeights:
    """kind: attention, experts or all. Zeros: only their sizes count."""
    modules: dict[str, Factors | ExpertsFactors] = {}
    for path, target in model.targets.items():
        is_experts = path.endswith("experts")
        if kind in ("all", "experts" if is_experts else "attention"):
            modules[path] = experts(rank) if is_experts else linear(target, rank)
    return AdapterWeights(modules)


def linear(target: object, rank: int) -> Factors:
    width, out = target.in_features, target.out_features  # type: ignore[attr-defined]
    return Factors(torch.zeros(1, rank, width), torch.zeros(1, out, rank), 1.0)


def experts(rank: int) -> ExpertsFactors:
    def pair(width: int, out: int) -> Factors:
        return Factors(torch.zeros(EXPERTS, rank, width), torch.zeros(EXPERTS, out, rank), 1.0)

    return ExpertsFactors(pair(HIDDEN, INNER), pair(HIDDEN, INNER), pair(INNER, HIDDEN))


def tensor_bytes(adapter: AdapterWeights, itemsize: int) -> int:
    total = 0
    for module in adapter.modules.values():
        parts = [module] if isinstance(module, Factors) else [module.gate, module.up, module.down]
        total += sum(part.a.numel() + part.b.numel() for part in parts if part is not None)
    return total * itemsize


def make_pool(
    model: TargetMap, slots: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> SlotPool:
    """A pool that lays out as on a GPU, in memory of the host."""
    from vexpert.lora import pool

    place = pool.start_alignment
    monkeypatch.setattr(
        "vexpert.lora.pool.start_alignment", lambda model, device, dtype: place(model, GPU, dtype)
    )
    return SlotPool(model, slots, nbytes, CPU, torch.bfloat16)


def test_device_bytes_are_the_tensors_within_three_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = targets(256)
    pool = make_pool(model, 64, 1 << 26, monkeypatch)
    random, wanted = Random(0), 0
    for index in range(40):
        kind = ("attention", "experts", "all")[index % 3]
        adapter = weights(model, random.choice(RANKS), kind)
        packed = pack(adapter, model, torch.bfloat16)
        slot = pool.install(packed)
        own = tensor_bytes(adapter, 2)
        assert own <= pool.resident_bytes(slot) <= 1.03 * own
        wanted += own
    assert pool.arena.used_bytes <= 1.03 * wanted
    assert pool.payload_bytes <= pool.arena.used_bytes
    pool.check_integrity()


def test_seven_times_as_many_as_slots_of_the_largest_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank-8 adapters in the memory that a pool of fixed rank 64 needs for 16 of them."""
    model = targets(64)
    fixed = 16 * full_adapter_bytes(model, GPU, torch.bfloat16)
    packed = pack(weights(model, 8, "all"), model, torch.bfloat16)
    pool = make_pool(model, 256, fixed, monkeypatch)
    count = 0
    while pool.arena.allocator.free_total >= packed.buffer.numel():
        pool.install(packed)
        count += 1
    assert count >= 7 * 16


def test_churn_of_mixed_sizes_wastes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was freed before, what fits in the free bytes is installed."""
    model = targets(256)
    kinds = [(rank, kind) for rank in RANKS for kind in ("attention", "experts", "all")]
    ready: list[PackedAdapter] = [
        pack(weights(model, rank, kind), model, torch.bfloat16) for rank, kind in kinds
    ]
    budget = 3 * ready[-1].nbytes
    slots = Slots(pool := make_pool(model, 64, budget, monkeypatch))
    random, fullest = Random(1), 0.0
    for _ in range(300):
        slots.put(random.choice(ready))
        fullest = max(fullest, pool.arena.used_bytes / pool.arena.nbytes)
        assert pool.arena.used_bytes <= 1.01 * pool.payload_bytes
    slots.check_integrity()
    assert fullest > 0.95
