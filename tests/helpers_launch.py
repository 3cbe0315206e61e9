"""Launches a kernel in many ways, directly and through Triton; prints what differs, as JSON.

Kernels are compiled for an H200; the driver here only notes what it is told to launch.
"""

import json
import random
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels import launch
from vexpert.kernels.compile_ahead import compile_only
from vexpert.kernels.launch import direct_launch

Launched = tuple[Any, ...]
launched: list[
    Launched
] = []  # binary, its handle, grid, stream, arguments with addresses for tensors
by_address: list[bool] = []  # of each launch: whether no argument was a tensor


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


class Launcher:
    def __init__(self, source: object, metadata: Any) -> None:
        self.name = metadata.hash, metadata.launch_pdl

    def __call__(self, *args: Any) -> None:
        *grid, stream, function, _, metadata, enter, leave = args[:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        given = [a.base if isinstance(a, TensorDescriptor) else a for a in args[9:]]
        by_address.append(not any(isinstance(a, torch.Tensor) for a in args[9:]))
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
        launched.append((self.name, function, tuple(grid), stream, *map(repr, plain)))


class Utils:
    """Gives every binary on every device a number."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[bytes, int], int] = {}

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        number = self.numbers.setdefault((binary, device), len(self.numbers))
        return number + 1, number, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class Driver:
    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = Utils()
        self.device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device


@triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["loose"])
def plain(x, loose, n, scale, free, rows, BLOCK: tl.constexpr, TMA: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if TMA:
        value = tl.reshape(rows.load([0, 0]), (BLOCK,)).to(tl.float32)
    else:
        value = tl.load(rows + at * n).to(tl.float32)
    tl.store(x + at + n, (value + tl.load(loose + at) * scale + free).to(x.dtype.element_ty))


def on_device(dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """[256] that begins `first` elements behind a multiple of 16 bytes."""
    whole = torch.zeros(512, dtype=dtype)
    assert whole.data_ptr() % 16 == 0
    return whole[first : first + 256].as_subclass(OnDevice)


def calls() -> list[tuple[Any, dict[str, Any]]]:
    """(grid, arguments) that need different binaries, and some that do not."""
    half = on_device(torch.bfloat16)
    usual: dict[str, Any] = {
        "x": half,
        "loose": on_device(torch.float32),
        "n": 48,
        "scale": 0.5,
        "free": 3,
        "rows": half,
        "BLOCK": 64,
        "TMA": False,
    }
    block = TensorDescriptor.from_tensor(half.view(16, 16), [4, 16])
    other = TensorDescriptor.from_tensor(half.view(8, 32), [2, 32])
    wide = TensorDescriptor.from_tensor(on_device(torch.float32).view(16, 16), [4, 16])
    changes: list[dict[str, Any]] = [
        {},
        {"x": on_device(torch.bfloat16, 1)},
        {"rows": on_device(torch.bfloat16, 4)},
        {"x": on_device(torch.bfloat16, 1), "rows": on_device(torch.bfloat16, 4)},
        {"x": on_device(torch.float16)},
        {"loose": on_device(torch.float32, 1)},
        *({"n": n} for n in (0, 1, True, 16, 17, 64, 2**31 - 1, 2**31, 2**40, -16)),
        *({"scale": scale} for scale in (1, 1.0, True, 2**31, 0.25)),
        *({"free": free} for free in (0, 1, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 1.0)),
        {"BLOCK": 32},
        {"num_warps": 2},
        {"num_warps": 8, "num_stages": 2},
        {"launch_pdl": True},
        {"maxnreg": 64},
        {"enable_fp_fusion": False},  # an option that only Triton knows
        *({"rows": rows, "TMA": True} for rows in (block, other, wide)),
        {"rows": block, "TMA": True, "n": 1},
    ]
    grids = [(4,), (4, 2), (4, 2, 3)]
    found: list[tuple[Any, dict[str, Any]]] = [
        (grids[i % 3], usual | change) for i, change in enumerate(changes)
    ]
    return [*found, (lambda _: (5,), usual)]


def run(kernel: Any, grid: Any, arguments: dict[str, Any]) -> Launched:
    kernel[grid](arguments["x"], **{k: v for k, v in arguments.items() if k != "x"})
    return launched[-1]


def compare(active: Driver, direct: Any) -> dict[str, int]:
    """Every call on two devices, in random orders: how often it was launched in another way."""
    cases = [(device, *call) for device in (0, 1) for call in calls()]
    active.device, wanted, wrong = 0, [], 0
    for device, *call in cases:
        active.device = device
        wanted.append(run(plain, *call))
    draw = random.Random(0)
    for _ in range(4):
        by_address.clear()
        for i in draw.sample(range(len(cases)), len(cases)):
            active.device = cases[i][0]
            wrong += run(direct, *cases[i][1:]) != wanted[i]
    active.device = 0
    binaries = len({(*want[0], want[1]) for want in wanted})
    others = len(cases) - sum(by_address)
    return {"wrong": wrong, "binaries": binaries, "not direct": others}


def follow_hooks(direct: Any) -> dict[str, Any]:
    """A profiler's hooks are called for a known key; without them nobody is."""
    grid, arguments = calls()[0]
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    run(direct, grid, arguments)
    knobs.runtime.launch_enter_hook.remove(hook)
    run(direct, grid, arguments)
    return {"hooked": seen, "direct without hooks": by_address[-1]}


def stay_triton(direct: Any) -> dict[str, Any]:
    """What is never launched directly, though its like is known."""
    grid, arguments = calls()[0]
    run(direct, grid, arguments)
    before = len(launched)
    with compile_only(threads=1):
        direct[grid](**arguments)
    said: dict[str, Any] = {"compiled only": len(launched) == before}
    run(direct, grid, arguments | {"x": arguments["x"].as_subclass(torch.Tensor)})
    said["a tensor of the host"] = not by_address[-1]
    try:
        direct[grid](*list(arguments.values())[:3])
    except TypeError as error:
        said["a mistake"] = "missing" in str(error)
    return said


def meet_numbers(direct: Any) -> list[bool]:
    """Whether numbers never seen, of a class that was, are launched directly at once."""
    grid, arguments = calls()[0]
    found = []
    for n, free in ((4800, 3), (4801, 3), (48, 12345)):
        run(direct, grid, arguments | {"n": n, "free": free})
        found.append(by_address[-1])
    return found


def bound_keys(direct: Any) -> bool:
    """More keys, and more numbers, than are kept: still right."""
    grid, arguments = calls()[0]
    launch.MOST_KEYS = 2
    numbers = [(1, 16, 17, 2**31, 2**32 + 1)[i % 5] + 16 * (i % 7) for i in range(35)]
    wanted = [run(plain, grid, arguments | {"n": n}) for n in numbers]
    return [run(direct, grid, arguments | {"n": n}) for n in numbers] == wanted


def main() -> None:
    active = Driver()
    driver.set_active(active)
    direct = direct_launch(plain)
    said: dict[str, Any] = compare(active, direct)
    said |= follow_hooks(direct) | stay_triton(direct) | {"new numbers": meet_numbers(direct)}
    said["bounded"] = bound_keys(direct)
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
