"""Base products of routed experts on a CPU.

Few rows per expert: one weighted sum of the rows of W^T, read where they lie, per pair; memory
bound. Measured, one thread, float32, 512 x 256 a weight, microseconds per expert with 1 / 2 / 4 / 8
rows: bags 24 / 31 / 45 / 75, products with W^T stored 44 / 60 / 60 / 70, with W stored
66 / 80 / 88 / 100. So weights are stored input-major, and bags serve up to 6 rows per expert.
"""

import numpy as np
import torch

from vexpert.ops.torch_bags import weighted_sums
from vexpert.ops.torch_routing import TorchArrangement, steps

BAG_ROWS_PER_EXPERT = 6


def input_major(weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """The view [E, K, N] of weight [E, N, K], or of [E, K, N] when transposed."""
    return weight if is_transposed else weight.transpose(1, 2)


def store_input_major(weight: torch.Tensor, is_transposed: bool) -> None:
    """Store the values of `weight` input-major, in place: shape and values stay, strides change."""
    view = input_major(weight, is_transposed)
    if not view.is_contiguous():
        stored = view.contiguous()
        weight.data = stored if is_transposed else stored.transpose(1, 2)


def grouped_gemm(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arrangement: TorchArrangement,
    is_transposed: bool,
) -> torch.Tensor:
    """y [P, N] of the arrangement's pairs; x [R, K], weight as `input_major`, bias [E, N]."""
    matrices = input_major(weight, is_transposed)
    rows = x if x_rows is None else x.index_select(0, x_rows)
    used = int(np.count_nonzero(arrangement.counts))
    if not used:
        return x.new_empty(0, matrices.shape[2])
    if matrices.is_contiguous() and rows.shape[0] <= BAG_ROWS_PER_EXPERT * used:
        y = _bags(rows, matrices, arrangement)
    else:
        y = _products(rows, matrices, arrangement)
    return y if bias is None else y.add_(bias.index_select(0, arrangement.expert))


def _bags(
    rows: torch.Tensor, matrices: torch.Tensor, arrangement: TorchArrangement
) -> torch.Tensor:
    """One bag per pair: row k of the expert's W^T, weighted by x[k]."""
    count, depth = rows.shape
    index = (arrangement.expert.numpy() * depth)[:, None] + steps(depth)
    return weighted_sums(
        rows.reshape(-1),
        matrices.view(-1, matrices.shape[2]),
        index.reshape(-1),
        steps(count, depth),
    )


def _products(
    rows: torch.Tensor, matrices: torch.Tensor, arrangement: TorchArrangement
) -> torch.Tensor:
    """One matrix product per expert that has rows."""
    y = rows.new_empty(rows.shape[0], matrices.shape[2])
    start = 0
    for expert in np.flatnonzero(arrangement.counts).tolist():
        stop = start + int(arrangement.counts[expert])
        torch.mm(rows[start:stop], matrices[expert], out=y[start:stop])
        start = stop
    return y


def combine(
    y: torch.Tensor, weights: torch.Tensor | None, arrangement: TorchArrangement
) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * y[row of (t, k)], summed in the order of k.

    y [P, H], weights [T, K] or None for ones; float32 inside, [T, H] in y's dtype.
    """
    position = arrangement.position
    if not len(position):
        return y.new_zeros(arrangement.num_tokens, y.shape[1])
    scale = None
    if weights is not None:
        scale = weights.reshape(-1).to(torch.float32)
        if arrangement.kept is not None:
            scale = scale.index_select(0, torch.from_numpy(arrangement.kept))
    out = weighted_sums(scale, y.to(torch.float32), position, arrangement.bag_start)
    return out.to(y.dtype)
