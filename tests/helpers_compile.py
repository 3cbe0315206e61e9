"""Compiles the shrink for an H200 without a GPU, and prints how its PTX loads, as one JSON line.

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


def shrink_ptx() -> dict[str, str]:
    """PTX of the shrink by whether pairs are ordered."""
    from test_kernels_moe import ALONE, ORDERED

    from vexpert.kernels.moe_factors import PairFactors, SiteFactors
    from vexpert.kernels.moe_order import identity_order, make_order
    from vexpert.kernels.moe_shrink import ShrinkShape, moe_shrink

    found: list[str] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel.asm["ptx"])
        return kernel

    JITFunction.run = compile_only
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


def main() -> None:
    driver.set_active(Driver())
    loads = {
        name: {
            "by 16": len(re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*\], 0x10", ptx)),
            "by 2": len(re.findall(r"ld\.global\S*\.b16", ptx)),
        }
        for name, ptx in shrink_ptx().items()
    }
    sys.stdout.write(json.dumps(loads) + "\n")


if __name__ == "__main__":
    main()
