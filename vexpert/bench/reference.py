"""What a layer must give, in float32 from the very values it holds, by plain PyTorch.

It shares no code with the paths that are timed, and reads every pair of the step.
"""

import torch

from vexpert.bench.draw import Draw
from vexpert.bench.layer import BenchLayer
from vexpert.ops.types import LoraSite, SiteTable

CHUNK_BYTES = 1 << 29  # of gathered factors

# Largest error of a token, ||out - reference|| / ||reference||. Half dtypes round some five times
# on the way, 2^-9 (bfloat16) or 2^-12 (float16) of each value: 1.2e-2 and 2e-3 at most were seen
# with the torch backend. One wrong pair of 8 is some 0.3.
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(layer: BenchLayer, draw: Draw, with_lora: bool) -> torch.Tensor:
    """[T, H] float32."""
    weights = layer.run.weights
    tokens, top_k = draw.topk_ids.shape
    expert = draw.topk_ids.reshape(-1)
    slot = draw.slots.repeat_interleave(top_k)
    x = draw.hidden.float().repeat_interleave(top_k, 0)
    gate_up, down = layer.sites
    y = _products(x, weights.gate_up, weights.gate_up_bias, expert, weights.is_transposed)
    if with_lora:
        _add_deltas(y, x, *gate_up, slot, expert)
    inner = weights.activate(y)
    y = _products(inner, weights.down, weights.down_bias, expert, weights.is_transposed)
    if with_lora:
        _add_deltas(y, inner, *down, slot, expert)
    scaled = y.view(tokens, top_k, -1) * draw.topk_weights.float()[:, :, None]
    return scaled.sum(1)


def largest_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Over tokens, ||out - expected|| / ||expected||; infinite if anything is not finite."""
    error = (out.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")


def _products(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    expert: torch.Tensor,
    is_transposed: bool,
) -> torch.Tensor:
    """W[e] x + b[e] of each pair: x [P, K] -> [P, N] float32."""
    y = x.new_empty(x.shape[0], weight.shape[2 if is_transposed else 1])
    for e in torch.unique(expert).tolist():
        rows = (expert == e).nonzero().view(-1)
        matrix = weight[e].float()
        y[rows] = x[rows] @ (matrix if is_transposed else matrix.t())
        if bias is not None:
            y[rows] += bias[e].float()
    return y


def _add_deltas(
    y: torch.Tensor,
    x: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    slot: torch.Tensor,
    expert: torch.Tensor,
) -> None:
    """Add B A x to the rows of y [P, out] that have a slot, in place."""
    for s in torch.unique(slot[slot >= 0]).tolist():
        rows = (slot == s).nonzero().view(-1)
        ranks = table.slice_rank[:, s].tolist()
        size = int(table.rank[s]) * site.in_features * 4
        for part in rows.split(max(1, CHUNK_BYTES // size)):
            h = _apply_a(x[part], site, table, s, expert[part])
            for i, rank in enumerate(ranks):
                _add_slice(y, h, site, table, (i, s, rank), part, expert[part])


def _apply_a(
    x: torch.Tensor, site: LoraSite, table: SiteTable, slot: int, expert: torch.Tensor
) -> torch.Tensor:
    """[n, in] -> [n, rank]."""
    start = table.a_offset[slot] + expert * table.a_stride[slot]
    a = _gather(table.arena, start, int(table.rank[slot]), site.in_features)
    return torch.einsum("nri,ni->nr", a, x)


def _add_slice(
    y: torch.Tensor,
    h: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    which: tuple[int, int, int],
    rows: torch.Tensor,
    expert: torch.Tensor,
) -> None:
    """Add B h of one (slice, slot, rank) to `rows` of y in place."""
    i, slot, rank = which
    column, part = int(table.slice_column[i, slot]), site.slices[i]
    start = table.b_offset[i, slot] + expert * table.b_stride[i, slot]
    b = _gather(table.arena, start, rank, part.size)
    out = y[:, part.start : part.start + (part.size - 1) * part.stride + 1 : part.stride]
    out[rows] += torch.einsum("nro,nr->no", b, h[:, column : column + rank])


def _gather(arena: torch.Tensor, start: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """Factors [n, rank, width] float32 that begin at elements `start` [n]."""
    low, high = int(start.min()), int(start.max()) + rank * width
    part = arena[low:high]
    steps = torch.arange(rank, device=start.device) * width
    windows = part.as_strided((part.numel() - width + 1, width), (1, 1))
    return windows[(start - low)[:, None] + steps].float()
