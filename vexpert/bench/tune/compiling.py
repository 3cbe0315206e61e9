"""Compiles candidates in processes of their own, and says which cannot be used.

A process compiles what a step would launch, launches nothing, and loads it: kernels that need more
shared memory than there is, or keep registers in memory, are found before anything is timed.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from vexpert.bench.cases import Case
from vexpert.bench.draw import Draw, draw
from vexpert.bench.layer import BenchLayer, layer_key
from vexpert.bench.measure import triton_errors
from vexpert.bench.tune.moe import run_plan
from vexpert.kernels.compile_ahead import compiled_kernels
from vexpert.ops.backend import select_backend
from vexpert.ops.moe_plan import MoePlan

MOST_PROCESSES = 15


@dataclass(frozen=True)
class Job:
    """One candidate for one case."""

    case: Case
    dtype: torch.dtype
    plan: MoePlan
    with_lora: bool


class Compilers:
    """Processes that live as long as a tuning; `processes` 0: none, every candidate is usable."""

    def __init__(self, processes: int | None = None) -> None:
        most = min(MOST_PROCESSES, os.cpu_count() or 1)
        self.processes = most if processes is None else processes
        self._pool: ProcessPoolExecutor | None = None

    def faults(self, jobs: Sequence[Job]) -> list[str | None]:
        """Of each candidate, why it cannot be used."""
        if self.processes == 0:
            return [None] * len(jobs)
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.processes, spawn)
        return [self._result(future) for future in [self._pool.submit(fault, j) for j in jobs]]

    def _result(self, future: "Future[str | None]") -> str | None:
        try:
            return future.result()
        except BrokenProcessPool:
            self._pool = None  # the next candidates get new processes
            return "the compiler's process ended"

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


_last: tuple[Case, BenchLayer, Draw] | None = None


def fault(job: Job) -> str | None:
    """Why the candidate cannot be used, or None; runs in a process of its own."""
    others: tuple[type[Exception], ...] = (RuntimeError, AssertionError)
    unusable = triton_errors() + others
    layer, step = _prepared(job)
    try:
        with torch.inference_mode(), compiled_kernels() as kernels:
            run_plan(layer, step, job.plan, job.with_lora)
        for kernel in kernels:
            kernel._init_handles()
    except unusable as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    spills = {kernel.metadata.name for kernel in kernels if kernel.n_spills}
    return f"registers in memory: {', '.join(sorted(spills))}" if spills else None


def _prepared(job: Job) -> tuple[BenchLayer, Draw]:
    """The case's layer and step; those of the last job are kept."""
    global _last
    if _last is None or _last[0] != job.case:
        device = torch.device("cuda")
        same = _last is not None and layer_key(_last[0]) == layer_key(job.case)
        layer = _last[1] if _last is not None and same else None
        _last = None
        backend = select_backend("triton", device, job.dtype)
        layer = layer or BenchLayer(job.case, device, job.dtype, backend)
        _last = job.case, layer, draw(job.case, device, job.dtype)
    return _last[1], _last[2]
