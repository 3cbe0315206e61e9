"""Work on several threads, for calls that release the interpreter's lock: reads, copies, checks.

Daemon threads, unlike an executor's: one that hangs in a dead file system must not keep the process
alive.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Sequence

import torch

from vexpert.at_exit import start_daemon

MOST_THREADS = 8


def thread_count() -> int:
    """Threads for one job: half of the cores, as others compute meanwhile; 8 at most."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))


def run_all(tasks: Sequence[Callable[[], None]], threads: int | None = None) -> None:
    """Run every task, in any order; raises the first error that one of them raised."""
    count = min(thread_count() if threads is None else threads, len(tasks))
    if count <= 1:
        for task in tasks:
            task()
        return
    errors: list[BaseException] = []
    numbers = itertools.count()

    def work() -> None:
        try:
            # next() on a counter is atomic: each task has one taker.
            while not errors and (number := next(numbers)) < len(tasks):
                tasks[number]()
        finally:
            # Not under a name: the error's traceback would hold this frame, and the frame it.
            errors.extend(filter(None, [sys.exception()]))

    # A thread has an inference mode of its own, and a tensor made in it is written to in it alone.
    mode = torch.is_inference_mode_enabled()

    def guarded() -> None:
        with contextlib.suppress(BaseException), torch.inference_mode(mode):  # raised again below
            work()

    helpers = [start_daemon(guarded, "vexpert-parallel", None) for _ in range(count - 1)]
    guarded()
    for helper in helpers:
        helper.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # as above: the memory that a task failed in is free with its error
