"""A dense layer, or several that read one input, with LoRA: two launches more at most.

| rows | launches |
|---|---|
| few | one product with LoRA in it, shrink included; or shrink, then product with LoRA |
| more | the library's product, in a graph with the shrink beside it; expand, which adds in place |
| many | the library's product; shrink; expand |
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from vexpert.kernels.common import can_use_pdl, ceil_div
from vexpert.kernels.dense_expand import dense_expand
from vexpert.kernels.dense_factors import DenseDelta, DenseFactors, ReaderTile
from vexpert.kernels.dense_few import can_few, dense_few
from vexpert.kernels.dense_linear import DenseLora, dense_linear
from vexpert.kernels.dense_order import MAX_SLOTS, RowOrder
from vexpert.kernels.dense_shrink import dense_shrink, room_for_h
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.kernels.replay import Replays
from vexpert.log import get_logger, log_once
from vexpert.ops.dense_plan import DensePlan, DenseShape, choose_dense_plan
from vexpert.ops.float32_linear import linear
from vexpert.ops.types import LoraSite, OutputSlice, PackedLora, SiteTable

logger = get_logger(__name__)

cuda: Any = torch.cuda  # its streams are not typed
DENSE = Replays("LoRA of a dense layer")
MOST_DEFERRED = 256  # rows: the reader of y reads each row's factors anew


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
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y [R, out]; `order` of x's rows, if there is LoRA; `plan` None: by the shape.

    out_dtype: x's (None), or float32, to which sums and deltas are added unrounded.
    """
    rows = x if x.stride(1) == 1 else x.contiguous()
    adapters = 0 if lora is None else lora.num_adapters
    plan = plan or choose_dense_plan(shape_of(x, weight.shape[0]), adapters)
    tile = plan.linear if x.shape[0] else None
    factors = () if lora is None else find_factors(lora)
    if tile is not None and lora is not None and len(factors) == 1:
        assert order is not None
        added = _shrunk(rows, order, factors[0], tile, plan, adapters)
        sizes = factors[0].sizes
        pdl = can_use_pdl(x.device)
        return dense_linear(rows, weight, bias, sizes, added, tile, pdl, out_dtype)
    if lora is not None and len(factors) == 1 and _can_fork(x, plan):
        assert order is not None
        h, y = _beside(rows, weight, bias, factors[0], order, plan, out_dtype)
        dense_expand(h, order, factors[0], plan.expand, y)
        return y
    if lora is None and 0 < x.shape[0] <= plan.few_rows and can_few(rows, weight):
        return dense_few(rows, weight, bias, None, can_use_pdl(x.device), out_dtype)[0]
    if tile is None:
        y = linear(x, weight, bias, out_dtype)
    else:
        sizes, pdl = (weight.shape[0],), can_use_pdl(x.device)
        y = dense_linear(rows, weight, bias, sizes, None, tile, pdl, out_dtype)
    if lora is not None:
        assert order is not None
        add_dense(rows, y, factors, order, plan)
    return y


def _shrunk(
    x: torch.Tensor,
    order: RowOrder,
    factors: DenseFactors,
    tile: DenseTile,
    plan: DensePlan,
    adapters: int,
) -> DenseLora:
    """What the product adds, shrunk by its own launch, if all rows are one tile, or before it."""
    if plan.inner and x.shape[0] <= tile.block_m:
        h, runs = room_for_h(x, factors, plan.shrink), min(x.shape[0], adapters)
        return DenseLora(order, factors, h, plan.shrink, runs)
    h = dense_shrink(x, order, factors, plan.shrink, can_use_pdl(x.device))
    return DenseLora(order, factors, h)


def deferred_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora: PackedLora,
    order: RowOrder,
    plan: DensePlan | None = None,
    tiles: bool = False,
) -> tuple[torch.Tensor, DenseDelta | None]:
    """(y, what is still to add to it); None: nothing, it has been added.

    `tiles`: the reader can do many rows, a tile at a time.
    """
    rows = x if x.stride(1) == 1 else x.contiguous()
    plan = plan or choose_dense_plan(shape_of(x, weight.shape[0]), lora.num_adapters)
    factors = find_factors(lora)
    reader = _reader(plan, factors, x.shape[0]) if tiles else None
    few = reader is None and 0 < x.shape[0] <= MOST_DEFERRED
    if len(factors) > 1 or not (few or reader):
        return packed_linear(x, weight, bias, lora, order, plan), None
    pdl, tile = can_use_pdl(x.device), plan.linear
    if x.shape[0] <= plan.few_rows and can_few(rows, weight):
        early = pdl and order.is_settled()  # it reads the slots before it waits
        return dense_few(rows, weight, bias, (order.slots, factors[0]), early)
    if tile is not None and plan.inner and x.shape[0] <= tile.block_m:
        added = replace(_shrunk(rows, order, factors[0], tile, plan, lora.num_adapters), adds=False)
        h, y = added.h, dense_linear(rows, weight, bias, factors[0].sizes, added, tile, pdl)
    elif _can_fork(x, plan):
        h, y = _beside(rows, weight, bias, factors[0], order, plan)
    else:
        h = dense_shrink(rows, order, factors[0], plan.shrink, pdl)
        y = functional.linear(x, weight, bias)
    return y, DenseDelta(h, order.slots, factors[0], reader)


def _reader(plan: DensePlan, factors: tuple[DenseFactors, ...], rows: int) -> ReaderTile | None:
    """How the reader of so many rows ends their LoRA; None: row by row, or not at all."""
    tile = plan.reader
    if tile is None or rows <= MOST_DEFERRED:
        return None
    if factors[0].width > tile.most_rank:
        log_once(logger, f"dense layers: ranks above {tile.most_rank} are not left to readers")
        return None
    return tile


def _can_fork(x: torch.Tensor, plan: DensePlan) -> bool:
    """Whether the shrink may run beside the library's product: free in a graph, dear without."""
    return plan.fork and x.is_cuda and x.shape[0] > 0 and torch.cuda.is_current_stream_capturing()


def _beside(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    factors: DenseFactors,
    order: RowOrder,
    plan: DensePlan,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, y) of the library's product and of the shrink beside it on another stream."""
    main, side = cuda.current_stream(x.device), _side_stream(x.device)
    h = room_for_h(x, factors, plan.shrink)  # of the main stream, as its last reader
    side.wait_stream(main)
    with cuda.stream(side):
        dense_shrink(x, order, factors, plan.shrink, h=h)
    y = linear(x, weight, bias, out_dtype)
    main.wait_stream(side)
    return h, y


@cache
def _side_stream(device: torch.device) -> Any:
    return cuda.Stream(device)


def add_dense(
    x: torch.Tensor,
    y: torch.Tensor,
    factors: tuple[DenseFactors, ...],
    order: RowOrder,
    plan: DensePlan,
) -> None:
    """Add the deltas of x [R, in] to y [R, out] in place; `factors` take columns in turn.

    y is of x's dtype, or float32.
    """
    if x.shape[0] == 0:
        return
    pdl = can_use_pdl(x.device)
    is_settled = order.is_settled()  # outside of what is replayed: it counts its readers

    def run() -> tuple[()]:
        start = 0
        for part in factors:
            stop = start + sum(part.sizes)
            h = dense_shrink(x, order, part, plan.shrink, pdl and is_settled)
            into = y if len(factors) == 1 else y[:, start:stop]
            dense_expand(h, order, part, plan.expand, into, pdl)
            start = stop
        return ()

    part = factors[0]
    if len(factors) > 1 or order.is_identity:
        run()
        return
    key = part.site_step, part.sizes, part.width, part.alignment, is_settled
    inputs = (x, y, *order.arrays, part.arena, part.table)
    DENSE(plan, key, inputs, run)


def find_factors(lora: PackedLora) -> tuple[DenseFactors, ...]:
    """All sites as the kernels take them, if their tables are evenly spaced; else each alone."""
    found, key = lora.tables[0].found, (lora.most_rank, *map(id, lora.tables))
    if key not in found:
        found[key] = lora.tables, _find_factors(lora)  # kept, so that the ids stay theirs
    factors: tuple[DenseFactors, ...] = found[key][1]
    return factors


def _find_factors(lora: PackedLora) -> tuple[DenseFactors, ...]:
    for site, table in zip(lora.sites, lora.tables, strict=True):
        assert is_dense(site, table), site
    first = lora.tables[0]
    width = ceil_div(max(lora.most_rank, 1), 16) * 16
    places = [table.packed.data_ptr() // 8 for table in lora.tables]
    step = places[1] - places[0] if len(places) > 1 else 0
    one = DenseFactors(
        first.arena,
        first.packed,
        step,
        tuple(site.out_features for site in lora.sites),
        width,
        first.arrivals,
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
