"""Compiles kernels ahead for an H200 without a GPU; prints what happened as one JSON line."""

import json
import sys

import torch
import triton
import triton.language as tl
from helpers_compile import Driver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vexpert.kernels.combine import _combine_kernel, combine
from vexpert.kernels.compile_ahead import compile_only


@triton.jit
def _broken(x):
    tl.store(x, unknown)  # type: ignore[name-defined]  # noqa: F821


def launch(dtype: torch.dtype) -> None:
    combine(torch.empty(6, 64, dtype=dtype), torch.zeros(6, dtype=torch.int64), None, 4, 2)


def main() -> None:
    driver.set_active(Driver())
    run, said = JITFunction.run, {}
    compiled = _combine_kernel.jit.device_caches
    with compile_only(threads=2):
        launch(torch.bfloat16)
        launch(torch.float16)
        launch(torch.bfloat16)
    said["kernels"] = len(compiled[0][0])
    said["are compiled"] = all(hasattr(kernel, "asm") for kernel in compiled[0][0].values())
    said["restored"] = JITFunction.run is run
    try:
        with compile_only(threads=2):
            raise KeyError("of the block")
    except KeyError:
        said["restored after an error"] = JITFunction.run is run
    try:
        with compile_only(threads=2):
            _broken[(1,)](torch.zeros(4, dtype=torch.int32))
    except triton.CompilationError:
        said["a kernel that is wrong raises"] = True
    with compile_only(threads=2):
        launch(torch.float32)
    said["kernels at last"] = len(compiled[0][0])
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
