"""Compiles many kernels at once: launches inside the block only say what they need.

Compilation takes half a second a kernel, and most of it runs without the GIL.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

import vexpert.kernels.launch  # noqa: F401  must have seen `run` as Triton has it

MOST_THREADS = 16


@contextmanager
def compile_only(threads: int | None = None) -> Iterator[None]:
    """Inside, every launch of this process compiles its kernel and launches nothing.

    The block's end waits until all are compiled; one that cannot be compiled raises there. What
    the launches would have written holds anything: only shapes may matter to the code inside.
    `threads` None: as many as cores, at most MOST_THREADS. Not for two threads at once.
    """
    count = threads or min(MOST_THREADS, os.cpu_count() or 1)
    run = JITFunction.run

    def compile_without_launch(
        self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(count, "vexpert-compile") as pool:
        JITFunction.run = compile_without_launch
        try:
            with triton.AsyncCompileMode(pool):
                yield
        finally:
            JITFunction.run = run
            # Left set by a kernel that could not be compiled: every later block would be refused.
            _async_compile.active_mode.set(None)


@contextmanager
def compiled_kernels() -> Iterator[list[Any]]:
    """Inside, every launch of this process compiles its kernel at once and launches nothing.

    The list that it gives holds what was compiled. Errors of the compiler are raised at the launch.
    """
    run = JITFunction.run
    found: list[Any] = []

    def compile_without_launch(
        self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any
    ) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(kernel)
        return kernel

    JITFunction.run = compile_without_launch
    try:
        yield found
    finally:
        JITFunction.run = run
