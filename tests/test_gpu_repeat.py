"""100 replays of one graph give the same bits: nothing is added up in the order of arrival."""

import pytest
import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import draw
from vexpert.bench.layer import BenchLayer
from vexpert.bench.reference import BOUNDS, largest_error, reference
from vexpert.bench.timer import GraphTimer
from vexpert.ops.backend import select_backend

REPLAYS = 100
DTYPE = torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "adapters", "ranks"),
    [(1, 1, (16,)), (8, 8, (16,)), (32, 8, (64,)), (128, 1, (16,)), (128, 32, (8, 16, 64)),
     (512, 32, (16,)), (2048, 1, (16,)), (2048, 8, (64,))],
)  # fmt: skip
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plans", "batch-invariant"])
def test_replays_are_equal(
    tokens: int, adapters: int, ranks: tuple[int, ...], batch_invariant: bool
) -> None:
    device = torch.device("cuda")
    shape = "qwen3-30b-a3b"
    case = Case(shape, ranks, adapters, tokens, adapters, 0.25)
    backend = select_backend("triton", device, DTYPE, batch_invariant=batch_invariant)
    with torch.inference_mode():
        layer, step = BenchLayer(case, device, DTYPE, backend), draw(case, device, DTYPE)
        replay = GraphTimer(device, 2).prepare(lambda: layer.forward(step, with_lora=True)).run
        first = replay().clone()
        assert largest_error(first, reference(layer, step, True)) < BOUNDS[DTYPE]
        differ = [i for i in range(REPLAYS) if not torch.equal(replay(), first)]
    assert not differ


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [1, 8])
def test_rows_alone_equal_rows_of_a_batch(adapters: int) -> None:
    """With the plans of `batch_invariant`: rows of a large step, some of them alone and mixed."""
    device = torch.device("cuda")
    case = Case("qwen3-30b-a3b", (16,), 8, 700, adapters, 0.25)
    backend = select_backend("triton", device, DTYPE, batch_invariant=True)
    with torch.inference_mode():
        layer, step = BenchLayer(case, device, DTYPE, backend), draw(case, device, DTYPE)
        whole = layer.forward(step, with_lora=True)
        for rows in ([3], [250], [5, 6, 7, 8], list(range(100, 133)), list(range(0, 700, 5))):
            part = step.rows(torch.tensor(rows, device=device))
            assert torch.equal(layer.forward(part, with_lora=True), whole[rows]), len(rows)
            base = layer.forward(part, with_lora=False)
            without = part.slots < 0
            assert torch.equal(base[without], whole[rows][without]), len(rows)
