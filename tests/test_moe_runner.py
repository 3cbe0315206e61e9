"""The MoE runner against a naive loop over tokens, with and without LoRA, on both backends."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers_lora import TOLERANCE, bits, relative_error
from helpers_moe import Flags, Hooks, Layer, make_layer, naive

from vexpert.errors import UnsupportedError
from vexpert.moe.runner import MoeRunner
from vexpert.ops.backend import select_backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_ops_gpu.py runs these")

BACKENDS = ("torch", "numba", "triton")
GRID = list(itertools.product((32, 64), (1, 2), (8, 20), (8, 16)))  # tokens, top-k, experts, rank
FLAGS = {
    "transposed": Flags(is_transposed=True),
    "no-gate": Flags(has_gate=False),
    "gpt-oss": Flags(is_transposed=True, is_interleaved=True, has_bias=True),
    "bias": Flags(has_bias=True),
    "llama4": Flags(is_transposed=True, scale_input=True),
}


def run_both(layer: Layer, name: str, classic: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The runner's outputs without hooks and with LoRA."""
    backend = select_backend(name, "cpu", layer.hidden.dtype)
    runner = MoeRunner(layer.weights, backend)
    step = (layer.hidden, layer.topk_ids, layer.topk_weights)
    return runner(*step), runner(*step, Hooks(layer, backend, classic).hooks)


def assert_layer(layer: Layer, name: str, classic: bool = False) -> None:
    """Base, and delta in float32; in half dtypes the whole, as the base's rounding is larger."""
    base, out = run_both(layer, name, classic)
    bound = TOLERANCE[out.dtype]
    expected_base, expected = naive(layer, False), naive(layer, True)
    assert relative_error(base, expected_base) < bound
    assert relative_error(out, expected) < bound
    if out.dtype == torch.float32:
        assert relative_error(out - base, expected - expected_base) < bound


@pytest.mark.parametrize("name", ["torch", "numba"])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "rank"), GRID)
def test_grid(tokens: int, top_k: int, experts: int, rank: int, name: str) -> None:
    assert_layer(make_layer(tokens, top_k, experts, rank), name)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "rank"), GRID[::5])
def test_grid_interpreted(tokens: int, top_k: int, experts: int, rank: int) -> None:
    assert_layer(make_layer(tokens, top_k, experts, rank), "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts", "rank"), GRID[::3])
def test_half_precision(tokens: int, top_k: int, experts: int, rank: int, dtype) -> None:
    assert_layer(make_layer(tokens, top_k, experts, rank, dtype=dtype), "torch")


@pytest.mark.parametrize("name", BACKENDS)
def test_classic_path(name: str) -> None:
    assert_layer(make_layer(16, 2, 8), name, classic=True)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("sentinel_share", [0.0, 0.4])
def test_flags(flags: Flags, sentinel_share: float, name: str) -> None:
    assert_layer(make_layer(9, 3, 5, 4, flags, sentinel_share=sentinel_share), name)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(0, 2, 4), (1, 1, 4), (1, 4, 4), (7, 4, 4), (70, 2, 4)]
)
def test_few_and_many_tokens(tokens: int, top_k: int, experts: int, name: str) -> None:
    assert_layer(make_layer(tokens, top_k, experts), name)


@pytest.mark.parametrize("name", BACKENDS)
def test_sentinels_add_exactly_nothing(name: str) -> None:
    """Even if their routing weight is NaN and the experts' outputs are huge."""
    layer = make_layer(8, 2, 4, flags=Flags(has_bias=True), sentinel_share=1.0)
    layer = replace(layer, topk_weights=torch.full_like(layer.topk_weights, float("nan")))
    base, out = run_both(layer, name)
    lost = ((layer.topk_ids < 0) | (layer.topk_ids >= 4)).all(1)
    assert lost.any()
    assert not base[lost].any()
    assert not out[lost].any()


@pytest.mark.parametrize("name", BACKENDS)
def test_deterministic_and_base_rows_equal_the_base(name: str) -> None:
    layer = make_layer(12, 2, 8)
    base, out = run_both(layer, name)
    again = run_both(layer, name)
    assert torch.equal(bits(base), bits(again[0]))
    assert torch.equal(bits(out), bits(again[1]))
    assert torch.equal(bits(out[layer.slots < 0]), bits(base[layer.slots < 0]))


def test_weights_keep_their_shape_and_values() -> None:
    """The torch backend stores them anew, in place: whoever holds the Parameter sees the same."""
    layer = make_layer(4, 2, 4)
    before = layer.weights.gate_up.clone()
    MoeRunner(layer.weights, select_backend("torch", "cpu", torch.float32))
    assert torch.equal(layer.weights.gate_up, before)
    assert layer.weights.gate_up.stride(1) == 1


def test_weights_that_do_not_fit_are_refused() -> None:
    weights = replace(make_layer(4, 2, 4).weights, is_transposed=True)
    with pytest.raises(UnsupportedError, match=r"experts' gate_up is \(4, 48, 32\)"):
        MoeRunner(weights, select_backend("torch", "cpu", torch.float32))
