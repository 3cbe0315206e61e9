"""LoRA on routed experts: the hooks that the MoE runner calls, or none."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vexpert.lora.layers.groups import RowGroups
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView, ExpertsTarget, LoraState
from vexpert.moe.types import MoeHooks, PairRows
from vexpert.ops.backend import LoraBackend
from vexpert.ops.types import ExpertsLora


class _ExpertsLora:
    """Both products of one experts layer; one grouping of the pairs serves them both."""

    def __init__(self, target: ExpertsTarget, state: LoraState, backend: LoraBackend) -> None:
        self.key = ("pairs", target.path)
        self.state = state
        self.gate_up = SiteDelta(target.gate_up, state, backend)
        self.down = SiteDelta(target.down, state, backend)
        up, down = self.after_gate_up, self.after_down
        self._hooks = {
            (False, False): None,
            (True, False): MoeHooks(after_gate_up=up),
            (False, True): MoeHooks(after_down=down),
            (True, True): MoeHooks(after_gate_up=up, after_down=down),
        }
        self._fuses = backend.can_fuse

    def hooks(self) -> MoeHooks | None:
        """The hooks of this step: only those whose product an active slot adapts."""
        view = self.state.view
        if view is None:
            return None
        adapted = self.gate_up.is_adapted(view), self.down.is_adapted(view)
        hooks = self._hooks[adapted]
        if hooks is None or not self._can_fuse(view):
            return hooks
        up, down = (
            (delta.site, delta.table) if is_adapted else None
            for delta, is_adapted in zip((self.gate_up, self.down), adapted, strict=True)
        )
        ranks = self.gate_up.most_rank(view), self.down.most_rank(view)
        lora = ExpertsLora(view.slots, view.active_slots, up, down, ranks, view.most_adapters)
        return replace(hooks, fused=lora)

    def _can_fuse(self, view: BatchView) -> bool:
        """Extras and the classic path need the layer step by step."""
        sites = self.gate_up.site.index, self.down.site.index
        has_extras = any(index in self.state.extras for index in sites)
        return self._fuses and view.use_virtual_experts and not has_extras

    def after_gate_up(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        self._add(self.gate_up, x, x_rows, y, rows)

    def after_down(
        self, x: torch.Tensor, x_rows: torch.Tensor | None, y: torch.Tensor, rows: PairRows
    ) -> None:
        self._add(self.down, x, x_rows, y, rows)

    def _add(
        self,
        delta: SiteDelta,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        y: torch.Tensor,
        rows: PairRows,
    ) -> None:
        view = self.state.view
        assert view is not None, "the hook outlived its step"
        delta.add(view, self._groups(view, rows), x, y, x_rows)

    def _groups(self, view: BatchView, rows: PairRows) -> RowGroups:
        cached = self.state.cache.get(self.key)
        if isinstance(cached, tuple) and cached[0] is rows:
            groups = cached[1]
            assert isinstance(groups, RowGroups)
            return groups
        groups = self.gate_up.group(view, view.slots.index_select(0, rows.token), rows.expert)
        self.state.cache[self.key] = (rows, groups)
        return groups


def experts_hooks(
    target: ExpertsTarget, state: LoraState, backend: LoraBackend
) -> Callable[[], MoeHooks | None]:
    """What to call at each step for the hooks of this layer; None: the base path alone."""
    return _ExpertsLora(target, state, backend).hooks
