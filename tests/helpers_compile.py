"""Compiles kernels for an H200 without a GPU, and prints how their PTX loads, as one JSON line.

A process of its own: the tests run Triton's interpreter, and a compiler needs a driver to ask.
"""

import json
import re
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """Says that there is an H200."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


RUN = JITFunction.run


def compile_only(found: list[str]) -> None:
    """From now on launches only compile; their PTX goes to `found`."""

    def run(self, *args, grid, warmup, **options):
        kernel = RUN(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel.asm["ptx"])
        return kernel

    JITFunction.run = run


def shrink_ptx() -> dict[str, str]:
    """PTX of the shrink by whether pairs are ordered."""
    from test_kernels_moe import ALONE, ORDERED

    from vexpert.kernels.moe_factors import PairFactors, SiteFactors
    from vexpert.kernels.moe_order import identity_order, make_order
    from vexpert.kernels.moe_shrink import ShrinkShape, moe_shrink

    found: list[str] = []
    compile_only(found)
    pairs = 64
    ints = torch.zeros(pairs, dtype=torch.int32)
    ids = torch.zeros(8, 8, dtype=torch.int64)
    packed = torch.zeros(11, 4, dtype=torch.int64)
    site = SiteFactors(torch.empty(64, dtype=torch.bfloat16), packed, 32, 16, alignment=8)
    slots = torch.zeros(8, dtype=torch.int64)
    factors = PairFactors.empty(slots, site, None, pairs)
    hidden = torch.empty(8, 2048, dtype=torch.bfloat16)
    shape = ShrinkShape(16, 1, 128, 4, 4)
    for plan in (ALONE, ORDERED):
        if plan.is_identity:
            order = identity_order(ids, factors, 128, 16)
        else:
            order = make_order(ids, factors, (ints,) * 10, 16, 128)
        moe_shrink(hidden, order, shape)
    return dict(zip(("identity", "ordered"), found, strict=True))


def dense_ptx() -> dict[str, str]:
    """PTX of a packed dense layer's shrink and product by the number of rows."""
    from vexpert.kernels.dense_linear import DenseLora, dense_linear
    from vexpert.kernels.dense_order import RowOrder
    from vexpert.kernels.dense_shrink import dense_shrink
    from vexpert.kernels.dense_tiles import DenseFactors
    from vexpert.ops.dense_plan import DenseShape, choose_dense_plan

    found: list[str] = []
    compile_only(found)
    sizes, depth, dtype = (512, 128, 128), 2048, torch.bfloat16
    arena, table = torch.empty(64, dtype=dtype), torch.zeros(21, 4, dtype=torch.int64)
    factors = DenseFactors(arena, table[:7], 28, sizes, 16, alignment=8)
    weight = torch.empty(sum(sizes), depth, dtype=dtype)
    for rows in (1, 8):
        ints = torch.zeros(128, dtype=torch.int32)
        order = RowOrder(ints[:rows], *(ints,) * 8, is_identity=rows == 1)
        x = torch.empty(rows, depth, dtype=dtype)
        plan = choose_dense_plan(DenseShape(rows, depth, sum(sizes), dtype), 8)
        h = dense_shrink(x, order, factors, plan.shrink)
        dense_linear(x, weight, None, sizes, DenseLora(h, order, factors), plan.linear)
    names = (f"dense {kind}, {rows} rows" for rows in (1, 8) for kind in ("shrink", "product"))
    return dict(zip(names, found, strict=True))


def main() -> None:
    driver.set_active(Driver())
    loads = {
        name: {
            "by 16": len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*\], 0x10", ptx)),
            "by 2": len(re.findall(r"ld\.global\S*\.b16", ptx)),
        }
        for name, ptx in (shrink_ptx() | dense_ptx()).items()
    }
    sys.stdout.write(json.dumps(loads) + "\n")


if __name__ == "__main__":
    main()
