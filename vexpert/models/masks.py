"""Which earlier tokens a layer's queries may see, read off the mask of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MaskKind:
    """Causal attention, over the last `window` tokens or within chunks of `chunk` tokens."""

    window: int | None = None
    chunk: int | None = None

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Bool, broadcast over int64 positions `query` and `key`: whether query may see key."""
        allowed = key <= query
        if self.window is not None:
            allowed &= key > query - self.window
        if self.chunk is not None:
            allowed &= key // self.chunk == query // self.chunk
        return allowed

    def first_key(self, first_query: int) -> int:
        """The earliest position that a query at `first_query` or later may see."""
        first = 0
        if self.window is not None:
            first = max(first, first_query - self.window + 1)
        if self.chunk is not None:
            first = max(first, first_query // self.chunk * self.chunk)
        return first


CAUSAL = MaskKind()


@dataclass(frozen=True)
class UnknownMask:
    """A mask that is none of ours; the layer that gets it cannot be served."""

    name: str


def identify(
    mask_function: Callable[..., Any], local_size: int | None, device: torch.device | None = None
) -> MaskKind | UnknownMask:
    """The kind that equals transformers' `mask_function(batch, head, query, key)`.

    `local_size` is the window or chunk that comes with it. Both are compared on a grid around the
    edges of the window. `device`: where the function keeps tensors of its own.
    """
    if device is not None and device.type == "meta":
        device = torch.device("cpu")  # the comparison needs values, and most functions keep none
    size = local_size or 1
    steps = (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 3)
    query = torch.tensor(sorted(set(steps)), device=device)[:, None]
    key = torch.arange(2 * size + 5, device=device)[None, :]
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    truth = torch.as_tensor(mask_function(zero, zero, query, key)).broadcast_to(
        query.shape[0], key.shape[1]
    )
    kinds = [CAUSAL]
    if local_size is not None:
        kinds = [MaskKind(window=local_size), MaskKind(chunk=local_size)]
    for kind in kinds:
        if torch.equal(kind.allowed(query, key), truth):
            return kind
    return UnknownMask(getattr(mask_function, "__qualname__", repr(mask_function)))
