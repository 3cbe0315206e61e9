"""The Triton backend on a GPU: every case in every dtype, graph replay, and the MoE runner.

`python -m pytest -m gpu tests` runs these alone.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers_graphs import capture
from helpers_lora import TOLERANCE, assert_delta, bits, relative_error
from helpers_lora_cases import SHAPES, make_case, run, zeros_for
from helpers_moe import Flags, Hooks, make_layer, naive

from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.moe_delta import DeltaShape
from vexpert.kernels.moe_product import TileShape
from vexpert.kernels.moe_shrink import ShrinkShape
from vexpert.moe.runner import MoeRunner
from vexpert.ops import fused_experts
from vexpert.ops.backend import select_backend
from vexpert.ops.moe_plan import BasePlan, DeltaPlan, LoraPlan, MoePlan

pytestmark = pytest.mark.gpu
DTYPES = list(TOLERANCE)
GRAPH_CASES = ("mixed", "sentinels", "deep", "one-expert", "many-virtual", "dense", "base-only")
GRAPH_RUNS = [(name, "triton") for name in GRAPH_CASES]
# without an adapter the classic path launches nothing: there is no graph to replay
GRAPH_RUNS += [(name, "triton-classic") for name in GRAPH_CASES if name != "base-only"]


def replay(call: Callable[[], None], reset: Callable[[], None]) -> None:
    """Warm up on a side stream, capture `call`, reset its output, replay."""
    graph, _ = capture(call)
    reset()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["triton", "triton-classic"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_reference(name: str, path: str, dtype: torch.dtype) -> None:
    case = make_case(name, dtype, "cuda")
    y = zeros_for(case)
    run(path, case, y)
    on_host = make_case(name, dtype)
    assert torch.equal(on_host.x, case.x.cpu())
    assert_delta(y, on_host)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_other_rows_are_untouched(name: str, dtype: torch.dtype) -> None:
    case = make_case(name, dtype, "cuda")
    y = torch.randn_like(zeros_for(case))
    y[:, ::5] = -0.0
    before = y.clone()
    run("triton", case, y)
    idle = case.unchanged_rows()
    assert torch.equal(bits(y[idle]), bits(before[idle]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "path"), GRAPH_RUNS)
def test_graph_replay_equals_eager(name: str, path: str, dtype: torch.dtype) -> None:
    case = make_case(name, dtype, "cuda")
    eager, y = zeros_for(case), zeros_for(case)
    run(path, case, eager)  # also learns active_slots, which the capture may not ask the device for
    replay(lambda: run(path, case, y), lambda: y.zero_())
    assert torch.equal(bits(y), bits(eager))


def test_a_graph_follows_new_slots_and_experts() -> None:
    """A replay with other routing in the same buffers: nothing of the capture is remembered."""
    case, other = make_case("mixed", device="cuda"), make_case("mixed", device="cuda", seed=5)
    assert case.experts is not None
    assert other.experts is not None
    y = zeros_for(case)

    def next_step() -> None:
        y.zero_()
        case.x.copy_(other.x)
        case.slots.copy_(other.slots)
        case.experts.copy_(other.experts)
        case.table.arena.copy_(other.table.arena)

    replay(lambda: run("triton", case, y), next_step)
    assert_delta(y.cpu(), make_case("mixed", seed=5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        Flags(),
        Flags(is_transposed=True, is_interleaved=True, has_bias=True),
        Flags(has_gate=False),
        Flags(is_transposed=True, scale_input=True),
    ],
    ids=["plain", "gpt-oss", "no-gate", "llama4"],
)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 2, 8), (32, 1, 8), (64, 2, 20)]
)
def test_runner(tokens: int, top_k: int, experts: int, flags: Flags, dtype: torch.dtype) -> None:
    layer = make_layer(tokens, top_k, experts, 8, flags, dtype, "cuda", sentinel_share=0.2)
    backend = select_backend("triton", "cuda", dtype)
    runner = MoeRunner(layer.weights, backend)
    hooks = Hooks(layer, backend).hooks
    step = (layer.hidden, layer.topk_ids, layer.topk_weights)
    base, out = runner(*step), runner(*step, hooks)
    assert relative_error(base, naive(layer, False)) < TOLERANCE[dtype]
    assert relative_error(out, naive(layer, True)) < TOLERANCE[dtype]
    idle = layer.slots < 0
    assert torch.equal(bits(out[idle]), bits(base[idle]))
    if tokens == 0:
        return  # nothing is launched, and a graph of nothing cannot be captured
    captured = torch.zeros_like(out)
    replay(lambda: captured.copy_(runner(*step, hooks)), lambda: captured.zero_())
    assert torch.equal(bits(captured), bits(out))


@pytest.mark.parametrize("block_m", [16, 64])
def test_delta_beside_the_product(block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that wait for each tile's delta, launched before it is complete."""
    layer = make_layer(300, 2, 5, 8, dtype=torch.bfloat16, device="cuda", sentinel_share=0.1)
    tile, shrink, delta = TileShape(16, 16), ShrinkShape(16, 1, 16), DeltaShape(16, 16, share=3)
    base = BasePlan(False, block_m, tile, tile, 64, can_use_pdl(torch.device("cuda")))
    lora = LoraPlan(shrink, shrink, True, 1, delta=DeltaPlan(16, delta, delta))
    monkeypatch.setattr(fused_experts, "choose_plan", lambda *_, **__: MoePlan(base, lora))
    backend = select_backend("triton", "cuda", torch.bfloat16)
    runner, hooks = MoeRunner(layer.weights, backend), Hooks(layer, backend).hooks
    step = (layer.hidden, layer.topk_ids, layer.topk_weights)
    out = runner(*step, hooks)
    assert relative_error(out, naive(layer, True)) < TOLERANCE[torch.bfloat16]
    for _ in range(20):
        captured = torch.zeros_like(out)
        replay(lambda y=captured: y.copy_(runner(*step, hooks)), captured.zero_)
        assert torch.equal(bits(captured), bits(out))


def test_arena_beyond_two_to_the_31_elements() -> None:
    """Offsets are 64-bit: factors that lie after element 2^31."""
    case = make_case("mixed", torch.bfloat16, "cuda")
    shift = 2**31 + 64
    arena = torch.zeros(shift + case.table.arena.numel(), dtype=torch.bfloat16, device="cuda")
    arena[shift:] = case.table.arena
    case.table.a_offset.add_(shift)
    case.table.b_offset.add_(shift)
    case = replace(case, table=replace(case.table, arena=arena))
    y = zeros_for(case)
    run("triton", case, y)
    assert_delta(y, make_case("mixed", torch.bfloat16))
