"""One launch as Triton's own compiled launcher takes it: numbers and addresses alone.

What stands between that launcher and Python differs: Triton 3.6 compiles one for each signature,
3.9 has one for all. Both take block descriptors as an encoded map, its shape and its strides.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from vexpert.kernels.launch import Launched

MOST_MAPS = 4096
TAKES_THREE = len(inspect.signature(nvidia.make_tensordesc_arg).parameters) == 3

Place = tuple[int, int]  # which base, and the offset from it


@dataclass
class BlockMap:
    """Encodes a block descriptor's map; those of addresses it met are kept."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str
    metadata: Any
    _maps: dict[int, Any] = field(default_factory=dict, compare=False)

    def __call__(self, address: int) -> Any:
        found = self._maps.get(address)
        if found is None:
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            found = self._maps[address] = self._encode(address)
        return found

    def _encode(self, address: int) -> Any:
        block = SimpleNamespace(
            base=SimpleNamespace(data_ptr=lambda: address),
            shape=self.shape,
            strides=self.strides,
            padding=self.padding,
            round_f32_to_tf32=False,
        )
        rest = (None,) if TAKES_THREE else ()
        return nvidia.make_tensordesc_arg(block, self.metadata, *rest)[0]


@dataclass
class FlatLaunch:
    """A launch whose addresses are still open."""

    kernel: Any  # kept: its binary is unloaded with it
    launcher: Callable[..., None]
    grid: tuple[int, int, int]
    options: tuple[Any, ...]  # of the launcher, behind the stream
    args: list[Any]
    places: list[tuple[int, int, int]]  # index in `args`, base, offset
    maps: list[tuple[int, int, int, BlockMap]]
    is_packed: bool  # the launcher takes `args` as one

    @property
    def wiring(self) -> tuple[Any, ...]:
        """All but sizes: the kernel, which argument is which base, and what is not whole."""
        places = tuple((index, base) for index, base, *_ in (*self.places, *self.maps))
        others = tuple(arg for arg in self.args if type(arg) is not int)
        return self.kernel.metadata.name, places, others

    def source(self, constant: Callable[[Any], str], stream: str) -> str:
        """Python that launches it: a{b} are addresses of bases; `constant` names a value."""
        args = [constant(arg) for arg in self.args]
        for index, base, offset in self.places:
            args[index] = f"a{base} + {constant(offset)}" if offset else f"a{base}"
        for index, base, offset, block in self.maps:
            args[index] = f"{constant(block)}(a{base} + {constant(offset)})"
        given = [*map(constant, self.grid), stream, *map(constant, self.options)]
        given += [f"({', '.join(args)},)"] if self.is_packed else args
        return f"{constant(self.launcher)}({', '.join(given)})"


def flatten(launched: Launched, find: Callable[[torch.Tensor], Place | None]) -> FlatLaunch | None:
    """`launched` with each tensor's address as `find` says; None: that is not possible."""
    bound = _bind(launched.kernel)
    if bound is None:
        return None
    launcher, options, is_packed, metadata = bound
    x, y, z = (*launched.grid, 1, 1)[:3]
    flat = FlatLaunch(launched.kernel, launcher, (x, y, z), options, [], [], [], is_packed)
    blocks = iter(metadata or ())
    for arg in launched.args:
        if isinstance(arg, TensorDescriptor):
            place, block = find(arg.base), next(blocks, None)
            if place is None or block is None:
                return None
            shape, strides = tuple(arg.shape), tuple(arg.strides)
            flat.maps.append((len(flat.args), *place, BlockMap(shape, strides, arg.padding, block)))
            flat.args += [None, *shape, *strides]
        elif isinstance(arg, torch.Tensor) and arg.numel() == 0:
            flat.args.append(0)  # such tensors have no memory
        elif isinstance(arg, torch.Tensor):
            place = find(arg)
            if place is None:
                return None
            flat.places.append((len(flat.args), *place))
            flat.args.append(None)
        else:
            flat.args.append(arg)
    return flat


def _bind(kernel: Any) -> tuple[Any, tuple[Any, ...], bool, Any] | None:
    """Launcher, its options, whether arguments are one tuple, and block descriptors' metadata."""
    launcher = kernel.run
    if type(launcher) is not nvidia.CudaLauncher or _needs_memory(launcher):
        return None
    blocks = getattr(kernel.metadata, "tensordesc_meta", None)
    flags = kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    packed = kernel.packed_metadata
    if hasattr(launcher, "arg_annotations"):
        rest = launcher.arg_annotations, launcher.kernel_signature
        nothing = (None,) * 5  # hooks, what they get, memory
        return driver.active.utils.launch, (*flags, packed, *nothing, *rest), True, blocks
    inner = _innermost(launcher.launch)
    if inner is None:
        return None
    return inner, (*flags, None, None, packed, None, None, None), False, blocks


def _needs_memory(launcher: Any) -> bool:
    sizes = launcher.global_scratch_size, launcher.profile_scratch_size
    return any(sizes) or getattr(launcher, "gsan_enabled", False)


def _innermost(launch: Any) -> Any:
    """The compiled launcher, behind what encodes block descriptors."""
    if isinstance(launch, types.BuiltinFunctionType):
        return launch
    cells = getattr(launch, "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells]
    inner = [value for value in found if isinstance(value, types.BuiltinFunctionType)]
    return inner[0] if len(inner) == 1 else None
