"""Replays small operations and notes what is launched; prints what they did, as one JSON line.

Kernels are compiled for an H200; the launcher behind them here only notes what it is given.
"""

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from helpers_launch import Driver, OnDevice, on_device
from torch.nn import functional
from triton import knobs
from triton.runtime import driver

from vexpert.kernels import launch_flat, replay
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.replay import Replays

Tensors = tuple[torch.Tensor | None, ...]
noted: list[tuple[Any, ...]] = []  # of each launch from a program: grid, stream, arguments
reasons: list[str] = []  # why something is not replayed
runs: list[str] = []  # of each operation that was run, not replayed


@direct_launch
@triton.jit
def scale(x, w, h, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(h + at, tl.load(x + at, mask=at < n) * tl.load(w + at, mask=at < n), mask=at < n)


@direct_launch
@triton.jit
def add(h, other, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(h + at, mask=at < n) + tl.load(other + at, mask=at < n), mask=at < n)


def bind(kernel: Any) -> tuple[Any, tuple[Any, ...], bool, Any]:
    """In place of Triton's own launcher: (x, y, z, stream, name of the kernel, arguments)."""
    return note, (kernel.metadata.name,), False, None


def note(x: int, y: int, z: int, stream: int, name: str, *args: Any) -> None:
    noted.append(((x, y, z), stream, name, args))


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32).as_subclass(OnDevice)


Operation = Callable[[torch.Tensor, torch.Tensor], Tensors]


def usual(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """y = x * w + x * w, by way of two rows of one tensor and of another one."""
    n = x.numel()
    rows, other, y = empty(2, n + 4), empty(n), empty(n)
    scale[(n // 32,)](x, w, rows[0], n, BLOCK=32)
    scale[(n // 32, 2)](x, w, rows[1], n, BLOCK=32)
    add[(n // 32,)](rows[0], rows[1], other, n, BLOCK=32)
    add[(n // 32,)](rows[1], other, y, n, BLOCK=32)
    return y, None


HELD = on_device(torch.float32)


def holds_another(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = empty(x.numel())
    add[(8,)](x, HELD, y, x.numel(), BLOCK=32)
    return (y,)


def computes(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = empty(x.numel())
    add[(8,)](x, w, y, x.numel(), BLOCK=32)
    return (y.mul_(2),)


def counts(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """Its number is another one each time."""
    y = empty(x.numel())
    add[(8,)](x, w, y, len(runs), BLOCK=32)
    return (y,)


def views(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = empty(2, x.numel())
    add[(8,)](x, w, y, x.numel(), BLOCK=32)
    return (y[0],)


def twice(x: torch.Tensor, w: torch.Tensor) -> Tensors:
    y = empty(x.numel())
    add[(8,)](x, w, y, x.numel(), BLOCK=32)
    return y, y


def apply(replays: Replays, operation: Operation, x: torch.Tensor, w: torch.Tensor) -> Tensors:
    def run() -> Tensors:
        runs.append(operation.__name__)
        return operation(x, w)

    return replays(None, operation.__name__, (x, w), run)


def times_run(operation: Operation) -> int:
    """How often five calls run it."""
    replays = Replays("it")
    runs.clear()
    for _ in range(5):
        apply(replays, operation, on_device(torch.float32), on_device(torch.float32))
    return len(runs)


def check_program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the launches noted last are those of `usual`."""
    n = x.numel()
    first, second, third = noted[0][3][2], noted[1][3][2], noted[2][3][2]
    (x_at, w_at, y_at) = (tensor.data_ptr() for tensor in (x, w, y))
    wanted = [
        ((n // 32, 1, 1), 7, "scale", (x_at, w_at, first, n, 32)),
        ((n // 32, 2, 1), 7, "scale", (x_at, w_at, second, n, 32)),
        ((n // 32, 1, 1), 7, "add", (first, second, third, n, 32)),
        ((n // 32, 1, 1), 7, "add", (second, third, y_at, n, 32)),
    ]
    every = sorted((x_at, w_at, y_at, first, second, third))
    apart = all(b - a >= 4 * n for a, b in pairwise(every))
    return noted == wanted and second - first == 4 * (n + 4) and apart


def replay_usual() -> dict[str, Any]:
    replays = Replays("it")
    runs.clear()
    weights = [on_device(torch.float32) for _ in range(3)]
    for w in weights:
        noted.clear()
        x = on_device(torch.float32)
        y, nothing = apply(replays, usual, x, w)
    assert y is not None
    said: dict[str, Any] = {
        "run": len(runs),
        "program": check_program(x, w, y),
        "result": (tuple(y.shape) == (256,), y.dtype == torch.float32, nothing is None),
    }
    spread = torch.zeros(512).as_subclass(OnDevice)[::2]
    for name, other, its in (
        ("another alignment", on_device(torch.float32, 1), w),
        ("another dtype", on_device(torch.bfloat16), w),
        ("another size", on_device(torch.float32)[:128], w[:128]),
        ("another layout", spread, w),
        ("one tensor twice", x, x),
        ("a tensor of the host", x.as_subclass(torch.Tensor), w),
    ):
        runs.clear()
        apply(replays, usual, other, its)
        said[name] = len(runs)
    return said


def multiplies(inner: Replays, x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """y = (x + x) W^T + x, the first sum by an operation that is replayed itself."""
    runs.append("multiplies")
    n = x.numel()

    def double() -> Tensors:
        runs.append("double")
        doubled = empty(n)
        add[(n // 32,)](x, x, doubled, n, BLOCK=32)
        return (doubled,)

    (doubled,) = inner(None, "double", (x,), double)
    assert doubled is not None
    product = functional.linear(doubled.view(-1, 16), w)
    y = empty(n)
    add[(n // 32,)](product, x, y, n, BLOCK=32)
    return (y,)


@torch.inference_mode()
def replay_product() -> dict[str, Any]:
    """Also at another length."""
    outer, inner = Replays("with a product"), Replays("inside")
    products: list[tuple[int, ...]] = []
    linear = functional.linear

    def note_product(x: torch.Tensor, w: torch.Tensor, bias: Any = None) -> torch.Tensor:
        made = linear(x, w, bias)
        products.append((*x.shape, x.data_ptr(), w.data_ptr(), made.data_ptr()))
        return made

    functional.linear = note_product  # type: ignore[assignment]
    said = {}
    for name, length, times in (("product", 256, 4), ("product at another length", 128, 3)):
        runs.clear()
        for _ in range(times):
            noted.clear()
            products.clear()
            x, w = on_device(torch.float32)[:length], on_device(torch.float32).view(16, 16)
            (y,) = outer(None, "it", (x, w), partial(multiplies, inner, x, w))
        assert y is not None
        ((rows, columns, doubled, weight, product),) = products
        x_at = x.data_ptr()
        wanted = [
            ((length // 32, 1, 1), 7, "add", (x_at, x_at, doubled, length, 32)),
            ((length // 32, 1, 1), 7, "add", (product, x_at, y.data_ptr(), length, 32)),
        ]
        right = noted == wanted and (rows * columns, weight) == (length, w.data_ptr())
        said[name] = right, runs.count("multiplies"), runs.count("double")
    functional.linear = linear
    return said


def watch() -> dict[str, Any]:
    """With a profiler's hook, everything is run."""
    replays = Replays("it")
    x, w = on_device(torch.float32), on_device(torch.float32)
    for _ in range(3):
        apply(replays, usual, x, w)
    runs.clear()

    def hook(metadata: Any) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    apply(replays, usual, x, w)
    apply(Replays("it"), usual, x, w)
    knobs.runtime.launch_enter_hook.remove(hook)
    said = {"watched": len(runs)}
    apply(replays, usual, x, w)
    return said | {"not watched any more": len(runs) - said["watched"]}


def bound_programs() -> int:
    """Three operations in turn where two are kept: how often nine calls run."""
    replay.MOST_PROGRAMS = 2
    replays = Replays("it")
    runs.clear()
    for _ in range(3):
        for size in (64, 128, 192):
            x, w = on_device(torch.float32)[:size], on_device(torch.float32)[:size]
            y, _ = apply(replays, usual, x, w)
            assert y is not None
            assert y.numel() == size
    return len(runs)


class Reasons(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        reasons.append(record.getMessage().partition(": ")[2])


def main() -> None:
    driver.set_active(Driver())
    launch_flat._bind = bind
    said: dict[str, Any] = replay_usual()
    others = (holds_another, computes, counts, views, twice)
    debug = logging.getLogger("vexpert.kernels.replay")
    debug.setLevel(logging.DEBUG)
    debug.addHandler(Reasons())
    said["never replayed"] = [times_run(operation) for operation in others]
    said["because"] = reasons.copy()
    said |= watch()
    said |= replay_product()
    said["bounded"] = bound_programs()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
