"""A Linear with far more outputs than rows, as lm_head is, in the form that this CPU runs faster.

BLAS libraries differ in what they do with one to a few dozen rows: for 32,000 x 256 in float32, MKL
on an AMD EPYC (2 cores) takes 3.9 / 6.5 / 8.4 ms for x W^T with 1 / 8 / 16 rows and 1.0 / 3.7 / 6.4
for (W x^T)^T. On other machines the first may win, so the choice is measured once for each shape.
"""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from vexpert.log import get_logger, log_once
from vexpert.ops.float32_linear import float32_linear, head_dtype

logger = get_logger(__name__)
Product = Callable[..., torch.Tensor]  # (x [..., in], weight [out, in], bias [out] or None)
MIN_ELEMENTS = 1 << 22  # of a weight; smaller ones differ by microseconds
ROWS = (1, 8, 32)  # what is measured; from the last on, x W^T is as good everywhere


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """(W x^T)^T + b for x [..., in], [..., out] contiguous. One row is computed twice, as a matrix:
    products with vectors are what is slow."""
    rows = x.reshape(-1, x.shape[-1])
    given = rows.repeat(2, 1) if rows.shape[0] == 1 else rows
    y = torch.mm(weight, given.t()).t()[: rows.shape[0]].contiguous()
    if bias is not None:
        y.add_(bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _measure_few_rows(weight: torch.Tensor) -> int:
    """The most rows, of `ROWS`, for which `few_rows_linear` is faster here; 0: none."""
    limit = 0
    for rows in ROWS:
        x = torch.zeros(rows, weight.shape[1])
        usual = _seconds(functional.linear, x, weight, None)
        if _seconds(few_rows_linear, x, weight, None) > usual:
            break
        limit = rows
    return limit


def _seconds(product: Product, *operands: torch.Tensor | None) -> float:
    """The fastest of three runs, after one that does not count."""
    times = []
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            product(*operands)
            times.append(time.perf_counter() - start)
    return min(times[1:])


# By shape and threads: all models of a process agree, so their results are equal bit for bit.
_measured: dict[tuple[int, int, int], int] = {}


def choose_linear(weight: torch.Tensor) -> Product:
    """What computes `F.linear(x, weight, bias)` fastest on this machine; measures if it matters.

    Its outputs are of `head_dtype(weight)`.
    """
    if head_dtype(weight) != weight.dtype:
        return float32_linear
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return functional.linear
    if weight.numel() < MIN_ELEMENTS:
        return functional.linear
    outputs, inputs = weight.shape
    key = (outputs, inputs, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _measure_few_rows(weight)
        log_once(logger, f"few rows of {outputs} x {inputs}: W x^T up to {_measured[key]} rows")
    most = _measured[key] * inputs

    def wide_linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = few_rows_linear if x.numel() <= most else functional.linear
        return product(x, weight, bias)

    return wide_linear
