"""What LoRA adds to a dense layer on a GPU: layer with adapters minus layer without, by plan.

`python bench/dense_layer.py [--out FILE] [--sweep]`. Times as `vexpert bench kernel` does: CUDA
graph replays, cold L2, medians, contenders in turns. A small kernel before the layer stands for the
one that makes its input. The order of the rows is made once per step and not in these figures.
`--sweep` compares tiles that the plans could name; `--compile I N` compiles the I-th of N shares.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TextIO

import torch
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from vexpert.bench.timer import Call, GraphTimer
from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.dense_expand import dense_expand
from vexpert.kernels.dense_order import RowOrder, order_rows
from vexpert.kernels.dense_shrink import DenseShrink, dense_shrink
from vexpert.kernels.dense_tiles import DenseTile
from vexpert.ops.backend import select_backend
from vexpert.ops.dense_plan import DensePlan, choose_dense_plan
from vexpert.ops.packed_linear import find_factors, packed_linear, shape_of
from vexpert.ops.types import LoraSite, OutputSlice, PackedLora, SiteTable

DEVICE = "cuda"
DTYPE, SLOTS = torch.bfloat16, 32
LAYERS = {"qkv": ((4096, 512, 512), 2048), "o": ((2048,), 4096)}
# rows, adapters, rank, share of base rows
CELLS = [
    (1, 1, 16, 0.0), (8, 1, 16, 0.0), (8, 8, 16, 0.0), (32, 1, 16, 0.0), (32, 8, 16, 0.0),
    (32, 32, 16, 0.0), (128, 1, 16, 0.0), (128, 8, 16, 0.0), (128, 32, 16, 0.0),
    (128, 32, 16, 0.5), (1, 1, 64, 0.0), (8, 8, 64, 0.0), (32, 32, 64, 0.0), (128, 32, 64, 0.0),
    (512, 8, 16, 0.0), (2048, 1, 16, 0.0), (8192, 1, 16, 0.0), (8192, 8, 16, 0.0),
]  # fmt: skip
SWEPT = {
    (1, 1, 16), (8, 8, 16), (32, 32, 16), (128, 32, 16), (128, 32, 64), (512, 8, 16), (8192, 8, 16)
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One layer and step."""

    name: str
    x: torch.Tensor
    weight: torch.Tensor
    slots: torch.Tensor
    lora: PackedLora
    order: RowOrder
    plan: DensePlan

    def reference(self, rows: torch.Tensor) -> torch.Tensor:
        """Deltas of `rows` in float32, adapter by adapter."""
        x, out = self.x[rows].float(), []
        for site, table in zip(self.lora.sites, self.lora.tables, strict=True):
            delta = torch.zeros(len(rows), site.out_features, device=x.device)
            for slot in self.lora.active_slots:
                mine, rank = self.slots[rows] == slot, table.host_rank[slot]
                a_at, b_at = int(table.a_offset[slot]), int(table.b_offset[0, slot])
                a = table.arena[a_at:][: rank * site.in_features].view(rank, -1).float()
                b = table.arena[b_at:][: rank * site.out_features].view(rank, -1).float()
                h = (x[mine] @ a.t()).to(DTYPE).float()
                delta[mine] = h @ b
            out.append(delta)
        return torch.cat(out, 1)


def make_cell(
    layer: str, rows: int, adapters: int, rank: int, base_share: float, in_runs: bool = False
) -> Cell:
    """`in_runs`: the rows of an adapter follow one another, as a prompt's do."""
    in_runs = in_runs or rows >= 1024
    sizes, depth = LAYERS[layer]
    torch.manual_seed(0)
    parts = [rank * (depth + size) for size in sizes]
    arena = torch.randn(SLOTS * sum(parts), device=DEVICE).mul_(depth**-0.5).to(DTYPE)
    both = torch.zeros(7 * len(sizes), SLOTS, dtype=torch.int64)
    for slot, (i, _) in itertools.product(range(SLOTS), enumerate(sizes)):
        start = slot * sum(parts) + sum(parts[:i])
        both[7 * i : 7 * i + 7, slot] = torch.tensor(
            [rank, start, 0, rank, 0, start + rank * depth, 0]
        )
    both = both.to(DEVICE)
    sites = tuple(
        LoraSite(i, f"{layer}{i}", 1, depth, size, (OutputSlice(0, size),), rank)
        for i, size in enumerate(sizes)
    )
    tables = tuple(
        SiteTable(arena, both[7 * i : 7 * i + 7], [rank] * SLOTS, 8) for i in range(len(sizes))
    )
    slots = torch.arange(rows) * adapters // rows if in_runs else torch.arange(rows) % adapters
    slots = slots if in_runs else slots[torch.randperm(rows)]
    slots[torch.rand(rows) < base_share] = -1
    slots = slots.to(DEVICE)
    routing = select_backend("triton", DEVICE, DTYPE).route(slots, None, 1, SLOTS)
    lora = PackedLora(sites, tables, routing, tuple(range(adapters)))
    x = torch.randn(rows, depth, device=DEVICE).to(DTYPE)
    weight = torch.randn(sum(sizes), depth, device=DEVICE).mul_(depth**-0.5).to(DTYPE)
    plan = choose_dense_plan(shape_of(x, sum(sizes)), adapters)
    name = f"{layer} {rows} rows {adapters} adapters rank {rank} base {base_share}"
    return Cell(name, x, weight, slots, lora, routing.order, plan)


def tiles(rows: int) -> Iterator[DenseTile]:
    """Products worth comparing."""
    shapes: list[tuple[int, ...]] = []
    if rows <= 16:
        shapes = [(16, 64, 128, 4, 4), (16, 32, 128, 4, 5), (16, 16, 256, 4, 4),
                  (16, 32, 256, 4, 3), (16, 64, 64, 4, 6), (16, 16, 128, 4, 6)]  # fmt: skip
    elif rows <= 32:
        shapes = [(32, 32, 128, 4, 4), (32, 64, 128, 4, 4), (32, 16, 128, 4, 5)]
    elif rows <= 128:
        shapes = [(128, 64, 128, 8, 3), (64, 64, 64, 4, 6), (64, 32, 128, 4, 4)]
    for m, n, k, warps, stages in shapes:
        yield DenseTile(m, n, k, warps, stages)


def shrinks(rows: int) -> list[DenseShrink]:
    """Shrinks worth comparing."""
    if rows == 1:
        given = [(4, 256, 4, 2), (8, 256, 4, 2), (16, 128, 4, 2), (4, 128, 4, 4)]
        return [DenseShrink(True, 16, 16, *rest) for rest in given]
    if rows <= 128:
        given = [(1, 128, 4, 4), (2, 128, 4, 4), (4, 128, 4, 4), (8, 128, 4, 4), (8, 256, 4, 2)]
        return [DenseShrink(True, 16, 16, *rest) for rest in given]
    return [
        DenseShrink(False, 64, 16, 1, 128, 4, 4), DenseShrink(False, 32, 16, 1, 128, 4, 4),
        DenseShrink(False, 32, 64, 1, 128, 4, 4), DenseShrink(False, 64, 64, 4, 64, 4, 4),
        DenseShrink(False, 32, 16, 4, 128, 4, 4), DenseShrink(False, 128, 64, 4, 64, 4, 4),
    ]  # fmt: skip


def expands(rows: int) -> list[DenseTile]:
    """Expands worth comparing."""
    if rows == 1:
        return [DenseTile(16, n, 0, 4, 1, 1) for n in (64, 128)]
    if rows <= 128:
        return [DenseTile(16, 64, 0, 4, 1, 1, True), DenseTile(16, 128, 0, 4, 1, 1, True),
                DenseTile(16, 256, 0, 4, 1, 1, True), DenseTile(16, 128, 0, 4, 1, 8),
                DenseTile(16, 64, 0, 2, 1, 1, True)]  # fmt: skip
    return [DenseTile(64, 128, 0, 4, 1, 1), DenseTile(64, 64, 0, 4, 1, 1),
            DenseTile(32, 128, 0, 4, 1, 1), DenseTile(128, 64, 0, 4, 1, 1),
            DenseTile(64, 128, 0, 4, 2, 1, False, 4), DenseTile(64, 128, 0, 4, 3, 1, False, 8),
            DenseTile(64, 64, 0, 4, 3, 1, False, 8), DenseTile(32, 128, 0, 4, 3, 1, False, 8),
            DenseTile(64, 256, 0, 8, 2, 1, False, 4),
            DenseTile(128, 128, 0, 8, 2, 1, False, 8)]  # fmt: skip


def contenders(cell: Cell, sweep: bool) -> dict[str, Call]:
    """Name -> call; base first. "base X" has its adapters' counterpart in "lora X"."""
    x, weight, lora, order, plan = cell.x, cell.weight, cell.lora, cell.order, cell.plan
    rows = x.shape[0]
    backend = select_backend("triton", DEVICE, DTYPE)
    source = x.clone()
    factors = find_factors(lora)
    library = replace(plan, linear=None)
    calls: dict[str, Call] = {}

    def add(name: str, call: Call) -> None:
        def step() -> torch.Tensor:
            torch.add(source, 0, out=x)  # makes the layer's input
            return call()

        calls[name] = step

    def old() -> torch.Tensor:
        y = functional.linear(x, weight)
        sizes = [site.out_features for site in lora.sites]
        for part, site, table in zip(y.split(sizes, 1), lora.sites, lora.tables, strict=True):
            h = backend.shrink(x, site, table, lora.routing)
            backend.expand(h, site, table, lora.routing, part)
        return y

    def with_plan(how: DensePlan, given: PackedLora | None):
        return lambda: packed_linear(x, weight, None, given, order, how)

    _ = lora.routing.blocks  # type: ignore[attr-defined]
    apart = replace(library, fork=False)
    add("base library", with_plan(library, None))
    add("lora library", with_plan(apart, lora))
    add("lora library forked", with_plan(replace(library, fork=True), lora))
    add("lora old", old)
    if plan.linear is not None:
        add("base plan", with_plan(plan, None))
        add("lora plan", with_plan(plan, lora))
    if not sweep:
        return calls
    h, y = dense_shrink(x, order, factors[0], plan.shrink), functional.linear(x, weight)
    add("part nothing", lambda: y)
    add("part order", lambda: order_rows(cell.slots, SLOTS).row)
    add(
        "part shrink",
        lambda: dense_shrink(x, order, factors[0], plan.shrink, can_use_pdl(x.device)),
    )
    add(
        "part expand",
        lambda: dense_expand(h, order, factors[0], plan.expand, y, can_use_pdl(x.device)) or y,
    )
    for tile in tiles(rows):
        how = replace(plan, linear=replace(tile, group=8))
        add(f"base {short(tile)}", with_plan(how, None))
        add(f"lora {short(tile)}", with_plan(how, lora))
    for shrink in shrinks(rows):
        if plan.linear is not None:
            add(f"lora plan, shrink {short(shrink)}", with_plan(replace(plan, shrink=shrink), lora))
        how = replace(library, shrink=shrink, fork=True)
        add(f"lora library forked, shrink {short(shrink)}", with_plan(how, lora))
        add(f"part shrink {short(shrink)}", part_shrink(cell, shrink))
    for expand in expands(rows):
        how = replace(library, expand=expand, fork=True)
        add(f"lora library forked, expand {short(expand)}", with_plan(how, lora))
    if rows > 1024:
        add("lora added before the product", lambda: before(cell, plan))
    return calls


def part_shrink(cell: Cell, shrink: DenseShrink) -> Call:
    factors = find_factors(cell.lora)[0]
    return lambda: dense_shrink(cell.x, cell.order, factors, shrink, can_use_pdl(cell.x.device))


def before(cell: Cell, plan: DensePlan) -> torch.Tensor:
    """Deltas in a new matrix, to which the library then adds its product."""
    factors = find_factors(cell.lora)[0]
    h = dense_shrink(cell.x, cell.order, factors, plan.shrink, can_use_pdl(cell.x.device))
    y = torch.zeros(cell.x.shape[0], cell.weight.shape[0], dtype=DTYPE, device=DEVICE)
    dense_expand(h, cell.order, factors, plan.expand, y, can_use_pdl(y.device))
    return y.addmm_(cell.x, cell.weight.t())


def short(plan: DenseTile | DenseShrink) -> str:
    return "/".join(str(int(value)) for value in vars(plan).values())


def check(cell: Cell, outputs: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any output against the reference; exits if it is large."""
    rows = torch.randperm(cell.x.shape[0], device=DEVICE)[:256]
    base = cell.x[rows].float() @ cell.weight.float().t()
    expected, worst = base + cell.reference(rows), 0.0
    for name, y in outputs.items():
        if name.startswith("part"):
            continue
        wanted = base if name.startswith("base") else expected
        error = ((y[rows].float() - wanted).norm() / wanted.norm()).item()
        worst = max(worst, error)
        if not error < 5e-3:
            sys.exit(f"{cell.name}: {name} is wrong, relative error {error:.1e}")
    return worst


def run(name: str, call: Call) -> torch.Tensor | None:
    """A copy of what `call` gives; None: its tile does not fit this GPU."""
    try:
        return call().clone()
    except OutOfResources as error:
        print(f"{name}: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--compile", nargs=2, type=int)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    number = 0
    timer = None if given.compile else GraphTimer(torch.device(DEVICE), given.repeats)
    out = open(given.out, "w") if given.out else None  # noqa: SIM115
    for layer, (rows, adapters, rank, share) in itertools.product(LAYERS, CELLS):
        cell = make_cell(layer, rows, adapters, rank, share)
        calls = contenders(cell, given.sweep and share == 0 and (rows, adapters, rank) in SWEPT)
        if given.compile:
            for name in sorted(calls):
                number += 1
                if number % given.compile[1] == given.compile[0]:
                    run(name, calls[name])
            continue
        report(cell, calls, timer, out)


def report(cell: Cell, calls: dict[str, Call], timer: GraphTimer, out: TextIO | None) -> None:
    outputs = {name: run(name, call) for name, call in calls.items()}
    outputs = {name: y for name, y in outputs.items() if y is not None}
    calls = {name: calls[name] for name in outputs}
    worst = check(cell, outputs)
    del outputs
    times = timer.time_in_turns({name: timer.prepare(call) for name, call in calls.items()})
    us = {name: timing.median for name, timing in times.items()}
    fastest = min(value for name, value in us.items() if name.startswith("base"))
    lines = [f"{value:8.2f} {value - fastest:+8.2f}  {name}" for name, value in us.items()]
    best = min((value, name) for name, value in us.items() if name.startswith("lora"))
    sites = cell.lora.sites
    active = len({slot for slot in cell.slots.tolist() if slot >= 0})
    moved = sum(
        cell.lora.tables[i].host_rank[0] * 2 * (s.in_features + s.out_features)
        for i, s in enumerate(sites)
    )
    plan = us.get("lora plan", us["lora library forked"]) - us.get("base plan", us["base library"])
    head = (
        f"{cell.name}: base library {us['base library']:.1f} fastest {fastest:.1f}; "
        f"added by plan {plan:+.2f}, best {best[0] - fastest:+.2f} ({best[1]}), "
        f"old {us['lora old'] - us['base library']:+.1f}, "
        f"floor {moved * active / 4.3e6:.2f}; error {worst:.0e}"
    )
    print(head, flush=True)
    if out is not None:
        print(head, *lines, sep="\n", file=out, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
