"""What an adapter does at one site beyond its factors, and its place behind them in the arena.

An output row of a slot with such an extra becomes, in this order:

| field | the row |
|---|---|
| weight | `weight @ x + b` instead of what the base weight W gives |
| token_ids, token_rows | columns (embedding: rows) of these tokens come from `token_rows` |
| gain, shift | `gain[e] * y + shift[e]` for expert e; a Linear has the one expert 0 |

Every tensor starts at a multiple of 16 bytes, so that float32 and int64 views of the arena exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from vexpert.errors import AdapterError

ALIGN_BYTES = 16


@dataclass(frozen=True)
class SiteExtra:
    """Extras of one adapter at one site; None: nothing of that kind.

    Before they are packed those in the arena's dtype may have another.
    """

    # [out, in] in the arena's dtype; an embedding: [V, dim]
    weight: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None  # [n] int64, ascending
    token_rows: torch.Tensor | None = None  # [n, in] in the arena's dtype; an embedding: [n, dim]
    gain: torch.Tensor | None = None  # [E or 1, out] float32
    shift: torch.Tensor | None = None  # [E or 1, out] float32


# Fields that keep their own dtype in the arena; the others are stored in the arena's.
DTYPES = {"token_ids": torch.int64, "gain": torch.float32, "shift": torch.float32}

SiteExtras = dict[int, SiteExtra]  # by site index


@dataclass(frozen=True)
class ExtraEntry:
    """Where one tensor of one site lies: `start` in elements of the arena's dtype."""

    site: int
    name: str  # a field of SiteExtra
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor, base: int) -> torch.Tensor:
        """The tensor inside `buffer` [N], whose adapter starts at element `base`."""
        count = torch.Size(self.shape).numel() * self.dtype.itemsize // buffer.element_size()
        return buffer[base + self.start :][:count].view(self.dtype).view(self.shape)


def plan_extras(
    extras: Mapping[int, SiteExtra], start: int, dtype: torch.dtype
) -> tuple[tuple[ExtraEntry, ...], int]:
    """Places for all tensors from element `start` on, and the first element behind them."""
    unit = max(1, ALIGN_BYTES // dtype.itemsize)
    entries: list[ExtraEntry] = []
    for site, extra in sorted(extras.items()):
        for spec in fields(SiteExtra):
            tensor = getattr(extra, spec.name)
            if tensor is not None:
                start = -(-start // unit) * unit
                stored = DTYPES.get(spec.name, dtype)
                entries.append(ExtraEntry(site, spec.name, start, tuple(tensor.shape), stored))
                start += -(-tensor.numel() * stored.itemsize // dtype.itemsize)
    return tuple(entries), start


def write_extras(
    buffer: torch.Tensor, entries: tuple[ExtraEntry, ...], extras: Mapping[int, SiteExtra]
) -> None:
    """Copy every tensor to its place in `buffer`; AdapterError where float16 cannot hold it."""
    for entry in entries:
        place = entry.view(buffer, 0)
        place.copy_(getattr(extras[entry.site], entry.name))
        if entry.dtype == torch.float16 and not bool(torch.isfinite(place).all()):
            raise AdapterError(
                f"the adapter's full {entry.name} has values beyond float16's range (65504); "
                "serve with dtype bfloat16 or float32"
            )


def view_extras(
    arena: torch.Tensor, entries: tuple[ExtraEntry, ...], base: int
) -> dict[int, SiteExtra]:
    """The extras of the adapter at element `base`, as views of the arena, by site index."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for entry in entries:
        found.setdefault(entry.site, {})[entry.name] = entry.view(arena, base)
    return {site: SiteExtra(**tensors) for site, tensors in found.items()}
