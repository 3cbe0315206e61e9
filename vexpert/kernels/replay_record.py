"""What an operation launched, as a program: see `replay`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vexpert.kernels.launch import Launched, recording
from vexpert.kernels.launch_flat import Place, flatten
from vexpert.kernels.replay_program import Made, Multiplied, Product, Program, Step, Tensors

ALIGNMENT = 512  # of intermediates in their block: no less than the allocator's

MAKERS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
VIEWS = frozenset(
    ("view", "_unsafe_view", "_reshape_alias", "alias", "detach", "select", "unbind", "slice",
     "split", "split_with_sizes", "expand", "unsqueeze", "squeeze", "t", "transpose", "permute",
     "as_strided")
)  # fmt: skip


def record(
    inputs: Sequence[torch.Tensor], run: Callable[[], Tensors]
) -> tuple[Tensors, Program | str]:
    """What `run` gives, and its program, or why it has none."""
    with recording() as launches, _Operations(launches) as operations:
        results = run()
    if operations.others:
        return results, f"it computes with {', '.join(sorted(operations.others))}"
    return results, _Addresses(inputs, results, operations.made).program(launches)


class _Operations(TorchDispatchMode):
    """Notes which memory is made, products among launches, and what else is done with tensors."""

    def __init__(self, launches: list[Launched | Multiplied | None]) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.others: set[str] = set()
        self._launches = launches
        self._kept: list[torch.Tensor] = []  # else their memory could be made twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        kind = _kind(func)
        if kind == "composite":  # as it is in inference mode
            with self:
                return func.decompose(*args, **given)
        result = func(*args, **given)
        if kind == "product":
            self._launches.append(_multiplied(result, *args, **given))
        if kind in ("maker", "product"):
            self._keep(result)
        elif kind == "other":
            self.others.add(func.overloadpacket.__name__)
        return result

    def _keep(self, made: torch.Tensor) -> None:
        self.made.add(made.untyped_storage().data_ptr())
        self._kept.append(made)


@cache
def _kind(func: Any) -> str:
    """What an operation of PyTorch is to a program."""
    name = func.overloadpacket.__name__
    if name == "linear":
        return "product"
    if name in MAKERS:
        return "maker"
    if name in VIEWS:
        return "view"
    return "composite" if func._can_decompose() else "other"


def _multiplied(result: torch.Tensor, x: Any, weight: Any, bias: Any = None) -> Multiplied:
    return Multiplied(x, weight, bias, result)


@dataclass
class _Addresses:
    """Finds what an address is: an input, a result, held, or in the block."""

    inputs: Sequence[torch.Tensor]  # [...] each, of any dtype; no two at one address
    results: Tensors
    made: set[int]
    size: int = 0  # of the block so far
    _bases: dict[int, Place] = field(default_factory=dict)  # of memory
    _held: list[Made] = field(default_factory=list)

    def program(self, launches: list[Launched | Multiplied | None]) -> Program | str:
        """The program, or what it cannot hold."""
        made = [result for result in self.results if result is not None]
        at = [tensor.data_ptr() for tensor in self.inputs]
        if len(set(at)) != len(at):
            return "two inputs have one address"
        self._first = len(at) + 1  # of results and what is held
        for i, result in enumerate(made):
            if not self._can_hold(result):
                return "a result has no memory of its own"
            self._bases[result.untyped_storage().data_ptr()] = (self._first + i, 0)
        self._first += len(made)
        self._at = {address: i for i, address in enumerate(at)}
        self._foreign = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        # Products first: what they read and make has tensors of its own, known to all launches.
        products = {
            i: self._product(step) for i, step in enumerate(launches) if type(step) is Multiplied
        }
        steps: list[Step | None] = []
        for i, step in enumerate(launches):
            if isinstance(step, Launched):
                steps.append(flatten(step, self.find))
            else:
                steps.append(products.get(i))
        known = tuple(step for step in steps if step is not None)
        if len(known) < len(launches):
            return "a launch is of another kind, or on a tensor that is no input"
        shapes = tuple(None if r is None else Made(tuple(r.shape), r.dtype) for r in self.results)
        return Program(known, len(at), self.size, shapes, tuple(self._held))

    def _can_hold(self, tensor: torch.Tensor) -> bool:
        """Whether it is all of its memory, which was made here and has no place yet."""
        memory = tensor.untyped_storage()
        whole = memory.nbytes() == tensor.numel() * tensor.element_size()
        known = memory.data_ptr() in self._bases
        is_own = memory.data_ptr() in self.made
        return whole and tensor.is_contiguous() and is_own and not known

    def _product(self, given: Multiplied) -> Product | None:
        x, weight, target = *map(self._operand, (given.x, given.weight)), self._hold(given.result)
        bias = None if given.bias is None else self._operand(given.bias)
        if x is None or weight is None or target is None or (bias is None) != (given.bias is None):
            return None
        if self._shape(weight, given.weight) is not None:
            return None
        return Product(x, self._shape(x, given.x), weight, bias, target)

    def _operand(self, tensor: torch.Tensor) -> int | None:
        """Which base it is, as it is or, of the same elements, in another shape."""
        index = self._at.get(tensor.data_ptr())
        if index is None:
            return self._hold(tensor)
        own = self.inputs[index]
        same = own.shape == tensor.shape and own.stride() == tensor.stride()
        flat = own.is_contiguous() and tensor.is_contiguous() and own.numel() == tensor.numel()
        return index if same or flat else None

    def _shape(self, index: int, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The shape of an operand, unless it is that of the base."""
        is_input = index < len(self.inputs)
        base = self.inputs[index] if is_input else self._held[index - self._first]
        return None if tuple(base.shape) == tuple(tensor.shape) else tuple(tensor.shape)

    def _hold(self, tensor: torch.Tensor) -> int | None:
        """The base of a tensor that is more than a place in the block."""
        memory = tensor.untyped_storage().data_ptr()
        if self._can_hold(tensor):
            self._bases[memory] = (self._first + len(self._held), 0)
            self._held.append(Made(tuple(tensor.shape), tensor.dtype))
        base, offset = self._bases.get(memory, (-1, 0))
        index = base - self._first
        whole = tensor.is_contiguous() and 0 <= index < len(self._held)
        if not whole or tensor.dtype != self._held[index].dtype or offset != 0:
            return None
        return base if tensor.numel() == self._held[index].numel else None

    def find(self, tensor: torch.Tensor) -> Place | None:
        """(base, offset) of a tensor's address; None: it is nothing that is known."""
        address, memory = tensor.data_ptr(), tensor.untyped_storage()
        if address in self._at:
            return self._at[address], 0
        start = memory.data_ptr()
        if start in self._foreign or start not in self.made:
            return None
        if start not in self._bases:
            self._bases[start] = (len(self.inputs), self.size)
            self.size += -(-memory.nbytes() // ALIGNMENT) * ALIGNMENT
        base, offset = self._bases[start]
        return base, offset + address - start
