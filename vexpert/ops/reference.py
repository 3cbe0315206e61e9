"""LoRA and base products, written to be read: one row at a time, in float64 unless told otherwise.

y[p] += B[s, e] @ (A[s, e] @ x[p]) for each row p with slot s >= 0 and an expert e on this rank.
"""

import torch

from vexpert.kernels.dense_factors import HeadColumns
from vexpert.ops.types import LoraSite, SiteTable


def factor_a(site: LoraSite, table: SiteTable, slot: int, expert: int) -> torch.Tensor:
    """A of one virtual expert, [rank, in]."""
    rank = int(table.rank[slot])
    start = int(table.a_offset[slot]) + expert * int(table.a_stride[slot])
    return table.arena[start : start + rank * site.in_features].view(rank, site.in_features)


def factor_b(site: LoraSite, table: SiteTable, part: int, slot: int, expert: int) -> torch.Tensor:
    """B of one virtual expert and output slice, [size, slice rank]; it holds the scale."""
    rank, size = int(table.slice_rank[part, slot]), site.slices[part].size
    start = int(table.b_offset[part, slot]) + expert * int(table.b_stride[part, slot])
    return table.arena[start : start + rank * size].view(rank, size).t()


def row_delta(
    x: torch.Tensor, site: LoraSite, table: SiteTable, slot: int, expert: int
) -> torch.Tensor:
    """Delta [out] of one row x [in], in x's dtype."""
    delta = torch.zeros(site.out_features, dtype=x.dtype, device=x.device)
    h = factor_a(site, table, slot, expert).to(x.dtype) @ x
    for i, part in enumerate(site.slices):
        column, rank = int(table.slice_column[i, slot]), int(table.slice_rank[i, slot])
        b = factor_b(site, table, i, slot, expert).to(x.dtype)
        stop = part.start + (part.size - 1) * part.stride + 1
        delta[part.start : stop : part.stride] += b @ h[column : column + rank]
    return delta


def lora_delta(
    x: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    slots: torch.Tensor,
    experts: torch.Tensor | None = None,
    x_rows: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Delta [P, out] in `dtype` of rows with `slots` [P], `experts` [P], from x [P or R, in]."""
    delta = torch.zeros(slots.shape[0], site.out_features, dtype=dtype, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        expert = 0 if experts is None else int(experts[row])
        if slot < 0 or not 0 <= expert < site.num_experts:
            continue
        source = row if x_rows is None else int(x_rows[row])
        delta[row] = row_delta(x[source].to(dtype), site, table, slot, expert)
    return delta


def reference_head_delta(
    x: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    slots: torch.Tensor,
    columns: HeadColumns,
    of_keys: bool,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """What `LoraBackend.add_by_head` adds for x [T, H, *]: [T, H, in or value] in `dtype`."""
    width = site.in_features if of_keys else columns.value
    delta = torch.zeros(*x.shape[:2], width, dtype=dtype, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        for head in range(columns.heads if slot >= 0 else 0):
            a = factor_a(site, table, slot, 0).to(dtype)
            b = factor_b(site, table, 0, slot, 0).to(dtype)[head * columns.width :]
            keys, values = b[: columns.key], b[columns.key : columns.width]
            its = x[row, head].to(dtype)
            delta[row, head] = a.t() @ (keys.t() @ its) if of_keys else values @ (a @ its)
    return delta


def grouped_gemm(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    is_transposed: bool,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """y[p] = W[e] x[p] + b[e], [P, N] in `dtype`; zero for a sentinel expert.

    weight is [E, N, K], or [E, K, N] when transposed.
    """
    width = weight.shape[2 if is_transposed else 1]
    y = torch.zeros(experts.shape[0], width, dtype=dtype, device=x.device)
    for row, expert in enumerate(experts.tolist()):
        if not 0 <= expert < weight.shape[0]:
            continue
        matrix = weight[expert].t() if is_transposed else weight[expert]
        source = row if x_rows is None else int(x_rows[row])
        y[row] = matrix.to(dtype) @ x[source].to(dtype)
        if bias is not None:
            y[row] += bias[expert].to(dtype)
    return y


def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sites: tuple[LoraSite, ...],
    tables: tuple[SiteTable, ...],
    slots: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """y [R, out] in `dtype` = W x + bias, and each site's delta on its own columns."""
    y = x.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        y += bias.to(dtype)
    deltas = [
        lora_delta(x, site, table, slots, dtype=dtype)
        for site, table in zip(sites, tables, strict=True)
    ]
    return y + torch.cat(deltas, 1)
