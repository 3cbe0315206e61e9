"""The classic path: one adapter after another, one expert after another, plain matrix products.

Baseline of the virtual experts and a cross-check: it shares no code with them. It looks at the
data on the host, so it cannot be captured in a graph.
"""

import torch

from vexpert.ops.types import LoraSite, SiteTable


def _factor(table: SiteTable, start: int, rows: int, width: int) -> torch.Tensor:
    matrix = table.arena[start : start + rows * width].view(rows, width)
    return matrix.to(torch.float32)


def _add_group(
    x: torch.Tensor,
    y: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    slot: int,
    expert: int,
    rows: torch.Tensor,
    x_rows: torch.Tensor,
) -> None:
    a_start = int(table.a_offset[slot]) + expert * int(table.a_stride[slot])
    a = _factor(table, a_start, table.host_rank[slot], site.in_features)
    h = x[x_rows].to(torch.float32) @ a.t()
    for i, part in enumerate(site.slices):
        rank, column = int(table.slice_rank[i, slot]), int(table.slice_column[i, slot])
        if rank == 0:
            continue
        b_start = int(table.b_offset[i, slot]) + expert * int(table.b_stride[i, slot])
        delta = h[:, column : column + rank] @ _factor(table, b_start, rank, part.size)
        stop = part.start + (part.size - 1) * part.stride + 1
        out = y[:, part.start : stop : part.stride]
        out[rows] = out[rows] + delta.to(y.dtype)


def apply_per_adapter(
    x: torch.Tensor,
    y: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    slots: torch.Tensor,
    experts: torch.Tensor | None,
    active_slots: tuple[int, ...],
    x_rows: torch.Tensor | None = None,
) -> None:
    """Add to y [P, out] in place: y[p] += B A x[x_rows[p]] for rows with a slot in `active_slots`.

    x [P or R, in]; slots, experts, x_rows [P] int64 (experts None: a dense layer).
    """
    for slot in active_slots:
        if table.host_rank[slot] == 0:
            continue
        rows = torch.nonzero(slots == slot).squeeze(1)
        found = [0] if experts is None else torch.unique(experts[rows]).tolist()
        for expert in found:
            if not 0 <= expert < site.num_experts:
                continue
            chosen = rows if experts is None else rows[experts[rows] == expert]
            source = chosen if x_rows is None else x_rows[chosen]
            _add_group(x, y, site, table, slot, expert, chosen, source)
