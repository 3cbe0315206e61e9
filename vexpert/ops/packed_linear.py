"""A dense layer, or several that read one input, with LoRA: two launches more at most.

| rows | launches |
|---|---|
| few | shrink; product with LoRA in it |
| many | shrink; the library's product; expand, which adds in place |
"""

from dataclasses import replace

import torch
import triton
from torch.nn import functional

from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.dense_expand import dense_expand
from vexpert.kernels.dense_linear import DenseLora, dense_linear
from vexpert.kernels.dense_order import MAX_SLOTS, RowOrder
from vexpert.kernels.dense_shrink import dense_shrink
from vexpert.kernels.dense_tiles import DenseFactors
from vexpert.ops.dense_plan import DensePlan, DenseShape, choose_dense_plan
from vexpert.ops.types import LoraSite, OutputSlice, PackedLora, SiteTable


def is_dense(site: LoraSite, table: SiteTable) -> bool:
    """Whether the kernels of dense layers take a site: no experts, one slice that is all of it."""
    whole = (OutputSlice(0, site.out_features),)
    return site.num_experts == 1 and site.slices == whole and len(table.host_rank) <= MAX_SLOTS


def shape_of(x: torch.Tensor, columns: int) -> DenseShape:
    """What the plan depends on, for x [R, K]."""
    return DenseShape(x.shape[0], x.shape[1], columns, x.dtype)


def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora: PackedLora | None,
    order: RowOrder | None,
    plan: DensePlan | None = None,
) -> torch.Tensor:
    """y [R, out]; `order` of x's rows, if there is LoRA; `plan` None: by the shape."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    adapters = 0 if lora is None else lora.num_adapters
    plan = plan or choose_dense_plan(shape_of(x, weight.shape[0]), adapters)
    tile = plan.linear if x.shape[0] else None
    if lora is None:
        if tile is None:
            return functional.linear(x, weight, bias)
        return dense_linear(rows, weight, bias, (weight.shape[0],), None, tile, _pdl(x))
    assert order is not None
    factors = find_factors(lora)
    if tile is None or len(factors) > 1:
        if tile is None:
            y = functional.linear(x, weight, bias)
        else:
            y = dense_linear(rows, weight, bias, (weight.shape[0],), None, tile, _pdl(x))
        add_dense(rows, y, factors, order, plan)
        return y
    # The kernel that made the order is no dependent launch's first half: see `order_rows`.
    h = dense_shrink(rows, order, factors[0], plan.shrink, _pdl(x))
    added = DenseLora(h, order, factors[0])
    return dense_linear(rows, weight, bias, factors[0].sizes, added, tile, _pdl(x))


def add_dense(
    x: torch.Tensor,
    y: torch.Tensor,
    factors: tuple[DenseFactors, ...],
    order: RowOrder,
    plan: DensePlan,
) -> None:
    """Add the deltas of x [R, in] to y [R, out] in place; `factors` take columns in turn."""
    if x.shape[0] == 0:
        return
    start = 0
    for part in factors:
        stop = start + sum(part.sizes)
        h = dense_shrink(x, order, part, plan.shrink, _pdl(x))
        dense_expand(h, order, part, plan.expand, y[:, start:stop], _pdl(x))
        start = stop


def find_factors(lora: PackedLora) -> tuple[DenseFactors, ...]:
    """All sites as the kernels take them, if their tables are evenly spaced; else each alone."""
    first = lora.tables[0]
    width = triton.cdiv(max(lora.most_rank, 1), 16) * 16
    places = [table.packed.data_ptr() // 8 for table in lora.tables]
    step = places[1] - places[0] if len(places) > 1 else 0
    one = DenseFactors(
        first.arena,
        first.packed,
        step,
        tuple(site.out_features for site in lora.sites),
        width,
        first.alignment,
    )
    even = all(place == places[0] + i * step for i, place in enumerate(places))
    alike = all(
        table.arena is first.arena and table.packed.shape == first.packed.shape
        for table in lora.tables
    )
    if even and alike:
        return (one,)
    return tuple(
        replace(
            one,
            arena=table.arena,
            table=table.packed,
            sizes=(site.out_features,),
            alignment=table.alignment,
        )
        for site, table in zip(lora.sites, lora.tables, strict=True)
    )


def _pdl(x: torch.Tensor) -> bool:
    return can_use_pdl(x.device)
