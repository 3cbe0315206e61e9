"""The rows of an activation matrix, grouped by adapter once for every site that has them."""

from dataclasses import dataclass, field

import torch

from vexpert.ops.backend import Routing


@dataclass(frozen=True)
class RowGroups:
    """Slot and expert of each row, and the routing over them (None on the classic path)."""

    slots: torch.Tensor  # [R] int64, -1: base
    experts: torch.Tensor | None  # [R] int64; None: a dense layer
    routing: Routing | None
    # [m] int64 by slot, once asked for.
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows_of(self, slot: int) -> torch.Tensor:
        """Rows of one slot, [m] int64. Waits for the device; only extras need it."""
        if slot not in self._rows:
            self._rows[slot] = (self.slots == slot).nonzero().view(-1)
        return self._rows[slot]
