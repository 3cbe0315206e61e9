"""Launches without Triton's binder, of calls whose like was launched before.

Triton binds, classifies and looks up every argument of every launch: 20 to 100 us on the host. Here
a launch's key is a tuple that holds all that Triton's own key depends on:

| argument | in the key |
|---|---|
| tensor | dtype, and its address modulo 16 unless the kernel forbids to specialise on it |
| block descriptor | dtype and shape of the block |
| number | its class; the bits it needs; if it is 1 or a multiple of 16, unless that is forbidden |
| constant, one of OPTIONS | the value |
| none of them | the current device |

A known key's binary is launched at once; an unknown one goes through Triton, and is known from
then on. Everything else goes through Triton each time: other options or kinds of arguments, tensors
that are not on a GPU, profilers' launch hooks, and anything that replaces `JITFunction.run`.
What Triton checks at each launch besides, that no global of the kernel has changed, is checked for
unknown keys alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_KEYS = 4096  # of one kernel
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")

_RUN = JITFunction.run
_ENTER, _EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
_UNSET = object()


class Launched(NamedTuple):
    """A launch that was made."""

    kernel: Any  # the compiled one
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # of all parameters, in their order


# By thread. None: a launch that cannot be noted; others may put in what is no launch.
_recordings: dict[int, list[Any]] = {}


def is_recording() -> bool:
    """Whether this thread's launches are being noted."""
    return bool(_recordings) and get_ident() in _recordings


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Inside, this thread's launches are made and noted."""
    launches: list[Any] = []
    assert get_ident() not in _recordings, "a recording inside another"
    _recordings[get_ident()] = launches
    try:
        yield launches
    finally:
        del _recordings[get_ident()]


def is_watched() -> bool:
    """Whether every launch has to go through Triton: hooks are set, or its `run` is replaced."""
    runtime = knobs.runtime
    return bool(
        JITFunction.run is not _RUN
        or runtime.launch_enter_hook is not _ENTER
        or runtime.launch_exit_hook is not _EXIT
        or _ENTER.calls
        or _EXIT.calls
    )


def direct_launch(kernel: Any) -> Any:
    """`kernel`, to be launched as before: kernel[grid](...). The interpreter's stays as it is."""
    is_compiled = isinstance(kernel, JITFunction) and torch.version.hip is None
    return DirectKernel(kernel) if is_compiled else kernel


class _Classes(dict[int | float, int]):
    """What Triton's specialisation sees of a number, by number. `is_free`: only the bits it needs.

    Of anything but an int, only its class counts.
    """

    def __init__(self, is_free: bool) -> None:
        super().__init__()
        self._is_free = is_free

    def __missing__(self, number: int | float) -> int:
        bits = 32 if -(2**31) <= number < 2**31 else 63 if -(2**63) <= number < 2**63 else 64
        found = bits if self._is_free else 4 * bits + 2 * (number == 1) + (number % 16 == 0)
        if len(self) >= MOST_KEYS:
            self.clear()
        self[number] = found
        return found


_SPECIAL, _FREE = _Classes(is_free=False), _Classes(is_free=True)


class DirectKernel:
    """A kernel and the binaries of the calls it knows."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._launches: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._launch: Callable[..., Any] = self._first

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if is_recording():
            return partial(self._note, grid)
        return self._launcher(grid)

    def _launcher(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if is_watched() or self.jit.pre_run_hooks:
            launch: Callable[..., Any] = self.jit[grid]
            return launch
        return partial(self._launch, grid)

    def _note(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        """Launch, for a recording."""
        kernel = self._launcher(grid)(*args, **options)
        names = self.jit.arg_names[len(args) :]
        is_whole = isinstance(kernel, CompiledKernel) and isinstance(grid, tuple)
        launched = None
        if is_whole and not is_watched() and all(name in options for name in names):
            launched = Launched(kernel, grid, (*args, *(options[name] for name in names)))
        _recordings[get_ident()].append(launched)
        return kernel

    def _first(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
        names = self.jit.arg_names[len(args) :]
        if not all(name in options for name in names):  # a default, or a mistake
            return self.jit[grid](*args, **options)
        rest = [options.pop(name) for name in names]
        return self.again((), None, grid, (*args, *rest), options)

    def again(
        self,
        kinds: tuple[str, ...],
        key: tuple[Any, ...] | None,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Launch what the launch for arguments of `kinds` did not know; `key` None: cannot."""
        found = self._kinds(args)
        if found != kinds and "other" not in found:
            self._launch = self._launches.get(found) or self._compile(found)
            return self._launch(grid, *args, **options)
        kernel = self.jit[grid](*args, **options)
        if key is not None and isinstance(kernel, CompiledKernel) and kernel.function is not None:
            records = self._launches[kinds].__globals__["_records"]
            if len(records) >= MOST_KEYS:
                records.clear()
            records[key] = kernel.run, kernel.function, kernel.packed_metadata, kernel
        return kernel

    def _kinds(self, args: tuple[Any, ...]) -> tuple[str, ...]:
        params = self.jit.params
        return tuple(
            "constant" if param.is_constexpr else _kind(arg)
            for param, arg in zip(params, args, strict=True)
        )

    def _compile(self, kinds: tuple[str, ...]) -> Callable[..., Any]:
        """The launch for arguments of these kinds."""
        scope: dict[str, Any] = {
            "_again": partial(self.again, kinds),
            "_driver": driver,
            "_records": {},
            "_UNSET": _UNSET,
            "_special": _SPECIAL,
            "_free": _FREE,
        }
        exec(_source(self.jit.params, kinds), scope)
        launch: Callable[..., Any] = scope["launch"]
        self._launches[kinds] = launch
        return launch


def _kind(arg: Any) -> str:
    if isinstance(arg, TensorDescriptor):
        return "descriptor"
    if isinstance(arg, torch.Tensor):
        return "tensor"
    return "number" if type(arg) in (int, float, bool) else "other"


def _source(params: list[Any], kinds: tuple[str, ...]) -> str:
    """A function of the kernel's parameters and options that looks up its key and launches."""
    names = [param.name for param in params]
    pairs = list(zip(params, kinds, strict=True))
    tensors = [param for param, kind in pairs if kind == "tensor"]
    passed = [f"_at_{p.name}" if kind == "tensor" else p.name for p, kind in pairs]
    bases = [p.name for p in tensors] + [f"{p.name}.base" for p, k in pairs if k == "descriptor"]
    every = ", ".join(names)
    options = ", ".join(f"{name}=_UNSET" for name in OPTIONS)
    given = ", ".join(f"({name!r}, {name})" for name in OPTIONS)
    addresses = "".join(f"        _at_{p.name} = {p.name}.data_ptr()\n" for p in tensors)
    return f"""
def launch(_grid, {every}, {options}, **_others):
    _key = _record = None
    _active = _driver.active
    _device = _active.get_current_device()
    try:
{addresses}\
        _key = ({", ".join(["_device", *_parts(pairs), *OPTIONS])})
        if {" and ".join(f"{base}.is_cuda" for base in bases) or "True"}:
            _record = _records.get(_key)
        else:
            _key = None
    except AttributeError:  # of an argument of another kind
        pass
    if _record is None or _others or _grid.__class__ is not tuple:
        _options = {{name: value for name, value in ({given}) if value is not _UNSET}}
        if _others:
            _key = None
        return _again(_key, _grid, ({every},), {{**_options, **_others}})
    _run, _function, _metadata, _kernel = _record
    _run(
        _grid[0], _grid[1] if len(_grid) > 1 else 1, _grid[2] if len(_grid) > 2 else 1,
        _active.get_current_stream(_device), _function, _metadata, None, None, None,
        {", ".join(passed)},
    )
    return _kernel
"""


def _parts(pairs: list[tuple[Any, str]]) -> list[str]:
    """Expressions of the key."""
    parts = []
    aligned = []
    for param, kind in pairs:
        name, free = param.name, param.do_not_specialize
        if kind == "tensor":
            parts.append(f"{name}.dtype")
            if not free and not param.do_not_specialize_on_alignment:
                aligned.append(f"_at_{name}")
        elif kind == "descriptor":
            parts += [f"{name}.base.dtype", f"tuple({name}.block_shape)"]
        elif kind == "number":
            parts += [f"{name}.__class__", f"{'_free' if free else '_special'}[{name}]"]
        else:
            parts.append(name)
    if aligned:  # 0, if all are
        each = ", ".join(f"{address} & 15" for address in aligned)
        parts.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    return parts
