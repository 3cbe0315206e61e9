"""Packing and installing keep exactly what an adapter means."""

from dataclasses import replace

import pytest
import torch
from helpers_adapters import (
    EXPERT_KINDS,
    EXPERTS,
    HIDDEN,
    INNER,
    TargetBuilder,
    adapter,
    canonical_delta,
    stored_delta,
    tiny_targets,
)

from vexpert.errors import AdapterError
from vexpert.lora.budget import full_adapter_bytes
from vexpert.lora.pack import align_up, pack, start_alignment
from vexpert.lora.parallel import run_all
from vexpert.lora.pool import SlotPool
from vexpert.lora.types import (
    AdapterWeights,
    ExpertsFactors,
    Factors,
    PerExpertFactors,
    TargetMap,
)

CPU = torch.device("cpu")
TARGETS = tiny_targets()


def make_pool(num_slots: int = 4, dtype: torch.dtype = torch.float32) -> SlotPool:
    return SlotPool(TARGETS, num_slots, 1 << 20, CPU, dtype)


def install(pool: SlotPool, weights: AdapterWeights, dtype: torch.dtype = torch.float32) -> int:
    packed = pack(weights, TARGETS, dtype)
    assert pool.block_bytes(packed.nbytes) <= pool.free_bytes
    return pool.install(packed)


def largest_error(pool: SlotPool, slot: int, targets: TargetMap, weights: AdapterWeights) -> float:
    """Largest difference over all sites and experts, of the largest delta."""
    worst, size = 0.0, 0.0
    for site in targets.sites:
        expected = canonical_delta(targets, weights, site)
        for expert in range(site.num_experts):
            got = stored_delta(site, pool.tables[site.index], slot, expert)
            worst = max(worst, float((got - expected[expert]).abs().max()))
        size = max(size, float(expected.abs().max()))
    return worst / size


@pytest.mark.parametrize("kind", EXPERT_KINDS)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_install_then_read_back_is_the_canonical_delta(kind: str, rank: int) -> None:
    pool, weights = make_pool(), adapter(TARGETS, seed=rank, rank=rank, kind=kind)
    install(pool, adapter(TARGETS, seed=99, rank=2))  # so that offsets do not start at 0
    slot = install(pool, weights)
    assert slot == 1
    assert largest_error(pool, slot, TARGETS, weights) < 1e-6
    pool.check_integrity()


def test_reading_back_sees_a_wrong_scale_expert_and_slice() -> None:
    pool, weights = make_pool(), adapter(TARGETS, seed=0, rank=4, kind="separate")
    slot = install(pool, weights)
    table = pool.tables[TARGETS.targets["experts"].gate_up.index]  # type: ignore[union-attr]
    up_column = int(table.slice_column[1, slot])
    table.slice_column[1, slot] = 0  # up reads gate's A
    assert largest_error(pool, slot, TARGETS, weights) > 1e-2
    table.slice_column[1, slot] = up_column
    table.a_offset[slot] += int(table.a_stride[slot])
    assert largest_error(pool, slot, TARGETS, weights) > 1e-2
    table.a_offset[slot] -= int(table.a_stride[slot])
    assert largest_error(pool, slot, TARGETS, weights) < 1e-6
    q = weights.modules["q"]
    assert isinstance(q, Factors)
    wrong = AdapterWeights({**weights.modules, "q": Factors(q.a, q.b, q.scale * 1.01)})
    assert largest_error(pool, slot, TARGETS, wrong) > 1e-4


def test_experts_that_vary_fastest_in_memory() -> None:
    """As in a file of PEFT: B [out, r * E], the expert fastest."""
    pool, weights = make_pool(), adapter(TARGETS, seed=0, rank=3, kind="separate")
    modules = dict(weights.modules)
    for path in ("experts", "ungated"):
        factors = modules[path]
        assert isinstance(factors, ExpertsFactors)
        assert factors.down is not None
        b = factors.down.b.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert b.stride(0) == 1
        modules[path] = replace(factors, down=replace(factors.down, b=b))
    slot = install(pool, AdapterWeights(modules))
    assert largest_error(pool, slot, TARGETS, weights) < 1e-6


def test_fused_gate_and_up_store_their_common_a_once() -> None:
    fused = pack(adapter(TARGETS, 0, 4, ("experts",), "fused"), TARGETS, torch.float32)
    entry = fused.entries[0]
    assert (entry.rank, entry.slice_rank, entry.slice_column) == (4, (4, 4), (0, 0))
    separate = pack(adapter(TARGETS, 0, 4, ("experts",), "separate"), TARGETS, torch.float32)
    entry = separate.entries[0]
    assert (entry.rank, entry.slice_rank, entry.slice_column) == (7, (4, 3), (0, 4))


def test_shared_factors_have_stride_0_and_cost_one_copy() -> None:
    weights = adapter(TARGETS, 0, 4, ("experts",), "outer")
    packed = pack(weights, TARGETS, torch.float32)
    gate_up, down = packed.entries
    assert gate_up.a_stride == 0
    assert gate_up.b_stride == (4 * INNER, 4 * INNER)
    assert down.a_stride == 4 * INNER
    assert down.b_stride == (0,)
    elements = 2 * 4 * HIDDEN + 2 * EXPERTS * 4 * INNER + EXPERTS * 4 * INNER + 4 * HIDDEN
    assert 4 * elements <= packed.nbytes < 4 * (elements + HIDDEN + INNER)


def test_bytes_follow_the_real_rank_and_the_real_targets() -> None:
    small = pack(adapter(TARGETS, 0, 2, ("q",)), TARGETS, torch.bfloat16)
    assert small.nbytes == 2 * (align_up(2 * HIDDEN, 24) + 2 * 24)
    assert small.rank == 2
    full = pack(adapter(TARGETS, 0, 8, kind="fused"), TARGETS, torch.bfloat16)
    assert small.nbytes * 50 < full.nbytes <= full_adapter_bytes(TARGETS, CPU, torch.bfloat16)


def test_the_largest_adapter_takes_what_the_budget_says() -> None:
    generator = torch.Generator().manual_seed(0)

    def part(out: int, width: int) -> Factors:
        a = torch.randn(EXPERTS, 8, width, generator=generator)
        return Factors(a, torch.randn(EXPERTS, out, 8, generator=generator), 1.0)

    modules = dict(adapter(TARGETS, 0, 8).modules)
    for path in ("experts", "alternating", "ungated"):
        gate = None if path == "ungated" else part(INNER, HIDDEN)
        modules[path] = ExpertsFactors(gate, part(INNER, HIDDEN), part(HIDDEN, INNER))
    packed = pack(AdapterWeights(modules), TARGETS, torch.float32)
    alignment = 4 * start_alignment(TARGETS, CPU, torch.float32)
    assert align_up(packed.nbytes, alignment) == full_adapter_bytes(TARGETS, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_starts_at_16_bytes(dtype: torch.dtype) -> None:
    packed = pack(adapter(TARGETS, 0, 3, kind="separate"), TARGETS, dtype)
    for entry in packed.entries:
        for offset in (entry.a_offset, *entry.b_offset):
            assert offset * dtype.itemsize % 16 == 0


def test_rows_of_all_adapters_line_up_on_a_cpu() -> None:
    pool = make_pool()
    for seed, rank in enumerate((1, 3, 4)):
        install(pool, adapter(TARGETS, seed, rank, kind="separate"))
    for site in TARGETS.sites:
        for i, output in enumerate(site.slices):
            table = pool.tables[site.index]
            used = table.slice_rank[i] > 0
            assert used.sum() == 3
            assert not (table.b_offset[i][used] % output.size).any()
    assert start_alignment(TARGETS, torch.device("cuda"), torch.bfloat16) == 8
    head = TargetBuilder()
    for width in (4096, 2880, 151_936 + 1):
        head.linear(f"to_{width}", 64, width)
    assert start_alignment(head.build(), CPU, torch.float32) == 4096 * 45


def test_the_scale_is_folded_before_rounding() -> None:
    a, b = torch.ones(1, 1, HIDDEN), torch.full((1, 24, 1), 1.0 + 2.0**-7)
    weights = AdapterWeights({"q": Factors(a.bfloat16(), b.bfloat16(), 1.0 + 2.0**-8)})
    packed = pack(weights, TARGETS, torch.bfloat16)
    got = packed.buffer[packed.entries[0].b_offset[0]]
    exact = torch.tensor((1.0 + 2.0**-7) * (1.0 + 2.0**-8)).bfloat16()
    scale_rounded_first = b[0, 0, 0].bfloat16() * torch.tensor(1.0 + 2.0**-8).bfloat16()
    assert got == exact != scale_rounded_first


def test_overflow_of_float16_is_refused() -> None:
    a, b = torch.ones(1, 1, HIDDEN), torch.full((1, 24, 1), 1e4)
    weights = AdapterWeights({"q": Factors(a, b, 64.0)})
    with pytest.raises(
        AdapterError,
        match=r"q.lora_B holds 10000 times the scale 64, beyond float16's range.*bfloat16",
    ):
        pack(weights, TARGETS, torch.float16)
    assert torch.isfinite(pack(weights, TARGETS, torch.bfloat16).buffer).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0])
def test_pairs_of_single_experts_pack_as_stacked_ones_do(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from several threads, whatever the buffer held before."""
    monkeypatch.setattr("vexpert.lora.parallel.thread_count", lambda: 4)
    monkeypatch.setattr("vexpert.lora.pack.TASK_ELEMENTS", 100)
    generator = torch.Generator().manual_seed(3)
    stacked, single = {}, {}
    for name, (width, out) in {"up": (16, 12), "down": (12, 16)}.items():
        a = torch.randn(4, 5, width, generator=generator).to(dtype)
        b = torch.randn(4, out, 5, generator=generator).to(dtype)
        stacked[name] = Factors(a, b, scale)
        single[name] = PerExpertFactors(tuple(a.clone()), tuple(b.clone()), scale)

    def dirty(size: int) -> torch.Tensor:
        return torch.full((size,), 7.0, dtype=dtype)

    packed = [
        pack(AdapterWeights({"experts": ExpertsFactors(**each)}), TARGETS, dtype, allocate=dirty)
        for each in (stacked, single)
    ]
    assert packed[0].entries == packed[1].entries
    assert torch.equal(packed[0].buffer, packed[1].buffer)
    (entry,) = [e for e in packed[0].entries if e.site == TARGETS.targets["experts"].down.index]
    place = packed[0].buffer[entry.b_offset[0] + entry.b_stride[0] :][: 5 * 16].view(5, 16)
    expected = (stacked["down"].b[1].float() * scale).to(dtype).t()
    assert torch.equal(place, expected)


def test_threads_share_the_callers_inference_mode() -> None:
    """A tensor made in inference mode may be written to by every thread of one job."""
    with torch.inference_mode():
        made = torch.zeros(4)
        run_all([lambda i=i: made[i].fill_(i) for i in range(4)], threads=4)
    assert made.tolist() == [0, 1, 2, 3]
