"""Compiles kernels for an H200 without a GPU, and prints how their PTX loads, as one JSON line.

A process of its own: the tests run Triton's interpreter, and a compiler needs a driver to ask.
"""

import json
import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vexpert.kernels.moe_delta import DeltaShape, moe_delta
from vexpert.kernels.moe_down import moe_down
from vexpert.kernels.moe_factors import PairFactors, SiteFactors
from vexpert.kernels.moe_order import identity_order, make_order
from vexpert.kernels.moe_pieces import find_pieces
from vexpert.kernels.moe_product import Expand, TileShape
from vexpert.kernels.moe_runs import find_runs
from vexpert.kernels.moe_shrink import ShrinkShape, moe_shrink

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """Says that there is an H200."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(found: list[str], name: str | None) -> None:
    """From here on kernels are compiled, not run; PTX of kernel `name`, or all, goes to `found`."""
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if name is None or self.fn.__name__ == name:
            found.append(kernel.asm["ptx"])
        return kernel

    JITFunction.run = compile_it


def make_factors(pairs: int) -> PairFactors:
    packed = torch.zeros(11, 4, dtype=torch.int64)
    arena = torch.empty(64, dtype=torch.bfloat16)
    up = SiteFactors(arena, packed, 32, 16, alignment=8)
    down = SiteFactors(arena, packed, 16, 16, alignment=8)
    return PairFactors.empty(torch.zeros(8, dtype=torch.int64), up, down, pairs)


def shrink_ptx() -> dict[str, str]:
    """The shrink by whether pairs are ordered, and of pieces of runs."""
    found: list[str] = []
    compile_only(found, "_shrink_kernel")
    compile_only(found, "_shrink_pieces_kernel")
    pairs = 64
    ints = torch.zeros(pairs, dtype=torch.int32)
    ids = torch.zeros(8, 8, dtype=torch.int64)
    factors = make_factors(pairs)
    hidden = torch.empty(8, 2048, dtype=torch.bfloat16)
    shape = ShrinkShape(16, 1, 128, 4, 4)
    ordered = make_order(ids, factors, (ints,) * 10, 16, 128)
    moe_shrink(hidden, identity_order(ids, factors, 128, 16), shape)
    moe_shrink(hidden, ordered, shape)
    moe_shrink(hidden, ordered, shape, runs=find_runs(ordered, 16, 1))
    return dict(zip(("identity", "ordered", "pieces"), found, strict=True))


def down_ptx() -> dict[str, str]:
    """down over runs, whose weights and inputs come as blocks: other loads are of factors."""
    found: list[str] = []
    compile_only(found, "_down_kernel")
    ints = torch.zeros(64, dtype=torch.int32)
    order = make_order(torch.zeros(8, 8, dtype=torch.int64), make_factors(0), (ints,) * 10, 64, 128)
    assert order.factors is not None
    assert order.factors.down is not None
    h = torch.empty(1, 64, 16, dtype=torch.bfloat16)
    expand = Expand(h, order.factors.down, find_runs(order, 16, 1), group=1, item_stages=3)
    inter = torch.empty(64, 768, dtype=torch.bfloat16)
    weight = torch.empty(128, 2048, 768, dtype=torch.bfloat16)
    moe_down(inter, weight, None, None, order, TileShape(128, 64, tma=True), expand)
    return {"down": found[0]}


def delta_ptx() -> dict[str, str]:
    """gate_up's delta and down's."""
    found: list[str] = []
    compile_only(found, "_delta_kernel")
    ints = torch.zeros(64, dtype=torch.int32)
    order = make_order(torch.zeros(8, 8, dtype=torch.int64), make_factors(0), (ints,) * 10, 64, 128)
    pieces, shape = find_pieces(order, 16), DeltaShape(128, 256, num_stages=3)
    moe_delta(torch.empty(8, 2048, dtype=torch.bfloat16), order, pieces, shape, 768)
    moe_delta(torch.empty(64, 768, dtype=torch.bfloat16), order, pieces, shape, 2048, True)
    return dict(zip(("delta of gate_up", "delta of down"), found, strict=True))


def dense_ptx() -> dict[str, str]:
    """PTX of a packed dense layer's shrink and product by the number of rows."""
    from vexpert.kernels.dense_factors import DenseFactors
    from vexpert.kernels.dense_linear import DenseLora, dense_linear
    from vexpert.kernels.dense_order import RowOrder
    from vexpert.kernels.dense_shrink import dense_shrink
    from vexpert.ops.dense_plan import DenseShape, choose_dense_plan

    found: list[str] = []
    compile_only(found, None)
    sizes, depth, dtype = (512, 128, 128), 2048, torch.bfloat16
    arena, table = torch.empty(64, dtype=dtype), torch.zeros(21, 4, dtype=torch.int64)
    arrivals = torch.zeros(1, dtype=torch.int32)
    factors = DenseFactors(arena, table[:7], 28, sizes, 16, arrivals, alignment=8)
    weight = torch.empty(sum(sizes), depth, dtype=dtype)
    for rows in (1, 8):
        ints = torch.zeros(128, dtype=torch.int32)
        order = RowOrder(ints[:rows], *(ints,) * 8, is_identity=rows == 1)
        x = torch.empty(rows, depth, dtype=dtype)
        plan = choose_dense_plan(DenseShape(rows, depth, sum(sizes), dtype), 8)
        assert plan.linear is not None
        h = dense_shrink(x, order, factors, plan.shrink)
        alone, both = DenseLora(order, factors, h), DenseLora(order, factors, h, plan.shrink, rows)
        for lora in (alone, both):
            dense_linear(x, weight, None, sizes, lora, plan.linear)
    kinds = ("shrink", "product", "product and shrink")
    names = (f"dense {kind}, {rows} rows" for rows in (1, 8) for kind in kinds)
    return dict(zip(names, found, strict=True))


def main() -> None:
    driver.set_active(Driver())
    loads = {
        name: {
            "by 16": len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*\], 0x10", ptx)),
            "narrower": len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*\], 0x[48]", ptx)),
            "by 2": len(re.findall(r"@%p\d+ ld\.global\S*\.b16", ptx)),
        }
        for name, ptx in (shrink_ptx() | down_ptx() | delta_ptx() | dense_ptx()).items()
    }
    sys.stdout.write(json.dumps(loads) + "\n")


if __name__ == "__main__":
    main()
