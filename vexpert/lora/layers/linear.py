"""nn.Linear with LoRA, and lm_head, whose rows are the step's sampled tokens."""

import torch
from torch import nn
from torch.nn import functional

from vexpert.errors import UnsupportedError
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView, LinearTarget, LoraState
from vexpert.ops.backend import LoraBackend
from vexpert.ops.float32_linear import head_dtype
from vexpert.ops.types import PackedLora
from vexpert.ops.wide_linear import Product, choose_linear


class LoraLinear(nn.Linear):
    """y = W x + b + B A x. Without a view, or if no active slot adapts it: the base alone.

    Build it with `wrap`: it takes over the parameters of a loaded nn.Linear, nothing is copied.
    """

    delta: SiteDelta
    product: Product = staticmethod(functional.linear)
    out_dtype: torch.dtype | None = None  # of the outputs; None: the inputs'
    rows_key = "tokens"  # routing shared by all layers over the same rows

    @classmethod
    def wrap(
        cls, linear: nn.Linear, target: LinearTarget, state: LoraState, backend: LoraBackend
    ) -> nn.Module:
        """A LoRA-aware module with the very weight and bias of `linear`.

        Raises UnsupportedError for a subclass with a forward of its own.
        """
        if type(linear).forward is not nn.Linear.forward:
            raise UnsupportedError(
                f"{target.path}: {type(linear).__name__} is more than a Linear; use wrap_router"
            )
        shape = (linear.out_features, linear.in_features)
        assert shape == (target.out_features, target.in_features), (target.path, shape)
        module = cls.__new__(cls)
        module.__dict__.update(linear.__dict__)
        module.delta = SiteDelta(target.site, state, backend)
        return module

    def slots(self, view: BatchView) -> torch.Tensor:
        """Slot of each row of the input, [R] int64."""
        return view.slots

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]; the leading dimensions, flattened, are the step's rows."""
        view = self.delta.state.view
        if self.delta.backend.can_pack:
            return self._packed(x, view)
        y = self.product(x, self.weight, self.bias)
        if view is not None and self.delta.is_adapted(view):
            rows = x.reshape(-1, self.in_features)
            self._add(view, rows, y.view(-1, self.out_features))
        return y

    def deferred(self, x: torch.Tensor) -> tuple[torch.Tensor, DenseDelta | None]:
        """y, and what its reader has still to add to it; None: nothing."""
        delta, view = self.delta, self.delta.state.view
        fits = view is not None and delta.backend.can_pack and delta.is_adapted(view)
        if view is None or not fits or not delta.fits(view, x, self.weight):
            return self.forward(x), None
        rows = x.reshape(-1, self.in_features)
        lora = self._lora(view)
        y, rest = delta.backend.deferred_linear(rows, self.weight, self.bias, lora)
        return y.view(*x.shape[:-1], self.out_features), rest

    def _lora(self, view: BatchView) -> PackedLora:
        delta = self.delta
        routing = delta.shared_group(view, self.rows_key, self.slots(view)).routing
        assert routing is not None, "the classic path does not fit"
        ranks, most = (delta.most_rank(view),), view.most_adapters
        return PackedLora((delta.site,), (delta.table,), routing, view.active_slots, ranks, most)

    def _packed(self, x: torch.Tensor, view: BatchView | None) -> torch.Tensor:
        """Base and LoRA as one operation of the backend, where the step allows it."""
        backend, delta = self.delta.backend, self.delta
        rows = x.reshape(-1, self.in_features)
        given = rows, self.weight, self.bias
        if view is None or not delta.is_adapted(view):
            y = backend.packed_linear(*given, None, self.out_dtype)
        elif delta.fits(view, x, self.weight):
            y = backend.packed_linear(*given, self._lora(view), self.out_dtype)
        else:
            y = backend.packed_linear(*given, None, self.out_dtype)
            self._add(view, rows, y)
        return y.view(*x.shape[:-1], self.out_features)

    def _add(self, view: BatchView, rows: torch.Tensor, y: torch.Tensor) -> None:
        """Add the delta and extras of the step to y [R, out] in place."""
        groups = self.delta.shared_group(view, self.rows_key, self.slots(view))
        self.delta.add(view, groups, rows, y, bias=self.bias)


class LoraLmHead(LoraLinear):
    """lm_head: its rows are those whose logits the step wants; they are of `head_dtype`."""

    rows_key = "logits"

    @classmethod
    def wrap(
        cls, linear: nn.Linear, target: LinearTarget, state: LoraState, backend: LoraBackend
    ) -> nn.Module:
        module = super().wrap(linear, target, state, backend)
        assert isinstance(module, LoraLmHead)
        module.product = choose_linear(linear.weight)
        module.out_dtype = head_dtype(linear.weight)
        return module

    def slots(self, view: BatchView) -> torch.Tensor:
        return view.logit_slots
