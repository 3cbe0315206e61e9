"""nn.Linear with LoRA, and lm_head, whose rows are the step's sampled tokens."""

import torch
from torch import nn
from torch.nn import functional

from vexpert.errors import UnsupportedError
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView, LinearTarget, LoraState
from vexpert.ops.backend import LoraBackend
from vexpert.ops.wide_linear import Product, choose_linear


class LoraLinear(nn.Linear):
    """y = W x + b + B A x. Without a view, or if no active slot adapts it: the base alone.

    Build it with `wrap`: it takes over the parameters of a loaded nn.Linear, nothing is copied.
    """

    delta: SiteDelta
    product: Product = staticmethod(functional.linear)
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
        y = self.product(x, self.weight, self.bias)
        view = self.delta.state.view
        if view is not None and self.delta.is_adapted(view):
            groups = self.delta.shared_group(view, self.rows_key, self.slots(view))
            rows = x.reshape(-1, self.in_features)
            self.delta.add(view, groups, rows, y.view(-1, self.out_features), bias=self.bias)
        return y


class LoraLmHead(LoraLinear):
    """lm_head: its rows are those whose logits the step wants."""

    rows_key = "logits"

    @classmethod
    def wrap(
        cls, linear: nn.Linear, target: LinearTarget, state: LoraState, backend: LoraBackend
    ) -> nn.Module:
        module = super().wrap(linear, target, state, backend)
        assert isinstance(module, LoraLmHead)
        module.product = choose_linear(linear.weight)
        return module

    def slots(self, view: BatchView) -> torch.Tensor:
        return view.logit_slots
