"""Programs: launches and library products whose addresses are still open; see `replay`.

A program is compiled to one Python function when it is first replayed: its launches cost what
Triton's compiled launcher and the driver cost, and little more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from triton.runtime.driver import driver

from vexpert.kernels.launch_flat import FlatLaunch

Tensors = tuple[torch.Tensor | None, ...]


class Multiplied(NamedTuple):
    """A product that the library made: functional.linear(x, weight, bias)."""

    x: torch.Tensor  # [..., K], all of one dtype
    weight: torch.Tensor  # [N, K] in x's dtype
    bias: torch.Tensor | None  # [N] in x's dtype
    result: torch.Tensor  # [..., N] in x's dtype


@dataclass(frozen=True)
class Made:
    """A tensor that a program makes: contiguous, in memory of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Product:
    """functional.linear of tensors by their bases; `shape`: of x, where it has another one."""

    x: int
    shape: tuple[int, ...] | None
    weight: int
    bias: int | None
    target: int


Step = FlatLaunch | Product


@dataclass(frozen=True)
class Program:
    """What is done. Bases of addresses: the inputs, the block, the results, what is held."""

    steps: tuple[Step, ...]
    num_inputs: int
    block: int  # bytes
    results: tuple[Made | None, ...]
    held: tuple[Made, ...] = ()  # operands and results of products: tensors, not places

    @cached_property
    def wiring(self) -> tuple[Any, ...]:
        """All but sizes: programs of one wiring are one operation at different lengths."""
        return tuple(
            (step.x, step.weight, step.bias, step.target)
            if isinstance(step, Product)
            else step.wiring
            for step in self.steps
        )

    def replay(
        self, inputs: Sequence[torch.Tensor], addresses: list[int], device: torch.device
    ) -> Tensors:
        """Do all of it on inputs at `addresses`."""
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        return self._run(inputs, addresses, device, stream)

    @cached_property
    def _run(self) -> Callable[..., Tensors]:
        constants = _Constants()
        source = "\n    ".join(self._lines(constants))
        scope: dict[str, Any] = {**constants.names, "empty": torch.empty}
        scope |= {"linear": functional.linear, "uint8": torch.uint8}
        exec(_compiled(f"def run(tensors, addresses, device, stream):\n    {source}\n"), scope)
        run: Callable[..., Tensors] = scope["run"]
        return run

    def _lines(self, constants: "_Constants") -> list[str]:
        """The function's body: base b is tensor t{b} at address a{b}."""
        inputs, made = range(self.num_inputs), self._made()
        late = {step.target for step in self.steps if isinstance(step, Product)}
        lines = [f"[{', '.join(f'a{i}' for i in inputs)}] = addresses"]
        lines += [f"block = empty({constants(coarse(self.block))}, dtype=uint8, device=device)"]
        lines += [f"a{self.num_inputs} = block.data_ptr()"]
        for base, one in made.items():
            if base not in late:
                shape, dtype = constants(one.shape), constants(one.dtype)
                lines.append(f"t{base} = empty({shape}, dtype={dtype}, device=device)")
                lines.append(f"a{base} = t{base}.data_ptr()")
        for step in self.steps:
            if isinstance(step, Product):
                lines.append(self._product(step, constants))
            else:
                lines.append(step.source(constants, "stream"))
        bases = iter(made)
        results = [None if one is None else f"t{next(bases)}" for one in self.results]
        return [*lines, f"return ({''.join(f'{result}, ' for result in results)})"]

    def _made(self) -> dict[int, Made]:
        """Results and what is held, by base."""
        whole = [one for one in self.results if one is not None]
        return dict(enumerate((*whole, *self.held), self.num_inputs + 1))

    def _product(self, step: Product, constants: "_Constants") -> str:
        def tensor(base: int) -> str:
            return f"tensors[{base}]" if base < self.num_inputs else f"t{base}"

        shape = constants(step.shape)
        x = tensor(step.x) + ("" if step.shape is None else f".view({shape})")
        bias = None if step.bias is None else tensor(step.bias)
        to = step.target
        return f"t{to} = linear({x}, {tensor(step.weight)}, {bias}); a{to} = t{to}.data_ptr()"


def coarse(size: int) -> int:
    """Bytes to ask for: one of eight sizes between a power of two and the next, at most 1/8 more.

    Programs of ever new lengths would ask for ever new sizes, and what the allocator keeps of a
    freed block serves no larger one.
    """
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """Kept: programs of one wiring have one source, and compiling it takes milliseconds."""
    return compile(source, "<program>", "exec")


class _Constants:
    """Names for values, so that a source has none of them."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def __call__(self, value: Any) -> str:
        if value is None:
            return "None"
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name
