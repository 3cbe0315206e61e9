"""What all LoRA layers share: one site's deltas, added to the rows of its output."""

from collections.abc import Hashable

import torch

from vexpert.lora.layers.extras import apply_extras
from vexpert.lora.layers.groups import RowGroups
from vexpert.lora.types import BatchView, LoraState
from vexpert.ops.backend import LoraBackend
from vexpert.ops.types import LoraSite, SiteTable


class SiteDelta:
    """Adds one site's delta to its output: what all LoRA layers share."""

    def __init__(self, site: LoraSite, state: LoraState, backend: LoraBackend) -> None:
        self.site = site
        self.state = state
        self.backend = backend

    @property
    def table(self) -> SiteTable:
        assert self.state.tables is not None, "a view is set, but no adapter pool"
        return self.state.tables[self.site.index]

    def most_rank(self, view: BatchView) -> int:
        """No active adapter has a higher rank at this site; 0: none adapts it. From the host."""
        if view.signature is not None:
            return view.signature.ranks[self.site.index]
        ranks = self.table.host_rank
        return max(ranks[slot] for slot in view.active_slots)

    def is_adapted(self, view: BatchView) -> bool:
        """Whether an active slot adapts this site; decided on the host."""
        return self.most_rank(view) > 0 or self.site.index in self.state.extras

    def fits(self, view: BatchView, *tensors: torch.Tensor) -> bool:
        """Whether one operation of the backend may do base and LoRA of a step.

        Extras, the classic path and dtypes other than the arena's go site by site.
        """
        dtype = self.table.arena.dtype
        return (
            view.use_virtual_experts
            and self.site.index not in self.state.extras
            and all(tensor.dtype is dtype for tensor in tensors)
        )

    def group(
        self, view: BatchView, slots: torch.Tensor, experts: torch.Tensor | None
    ) -> RowGroups:
        """Group rows by (slot, expert)."""
        if not view.use_virtual_experts:
            return RowGroups(slots, experts, None)
        num_slots = len(self.table.host_rank)
        routing = self.backend.route(slots, experts, self.site.num_experts, num_slots)
        return RowGroups(slots, experts, routing)

    def shared_group(self, view: BatchView, key: Hashable, slots: torch.Tensor) -> RowGroups:
        """Group the rows of a dense layer, once per step for all layers with this `key`."""
        groups = self.state.cache.get(key)
        if groups is None:
            groups = self.state.cache[key] = self.group(view, slots, None)
        assert isinstance(groups, RowGroups)
        return groups

    def add(
        self,
        view: BatchView,
        groups: RowGroups,
        x: torch.Tensor,
        y: torch.Tensor,
        x_rows: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Add to y [R, out] in place the delta of x [R or fewer, in]; `x_rows` [R]: rows of x.

        Extras of the step's adapters follow; `bias` [out] is what the base added to y.
        """
        self._add_factors(view, groups, x, y, x_rows)
        if self.state.extras:
            extras = self.state.extras.get(self.site.index, ())
            apply_extras(extras, groups, x, y, x_rows, bias)

    def _add_factors(
        self,
        view: BatchView,
        groups: RowGroups,
        x: torch.Tensor,
        y: torch.Tensor,
        x_rows: torch.Tensor | None,
    ) -> None:
        """B A x added to y in place.

        Factors multiply in the arena's dtype whatever x's is (routers may run in float32). Of x in
        that dtype, what is added to a float32 y is not rounded to it in between.
        """
        table = self.table
        dtype = table.arena.dtype
        if x.dtype is not dtype or y.dtype not in (dtype, torch.float32):
            delta = torch.zeros_like(y, dtype=dtype)
            self._add_factors(view, groups, x.to(dtype), delta, x_rows)
            y.add_(delta)
        elif groups.routing is not None:
            self.backend.apply(x, y, self.site, table, groups.routing, x_rows)
        else:
            self.backend.apply_per_adapter(
                x, y, self.site, table, groups.slots, groups.experts, view.active_slots, x_rows
            )
