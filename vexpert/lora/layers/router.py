"""LoRA on a router that keeps a bare weight: its logits come from one F.linear call inside it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vexpert.errors import UnsupportedError
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import BatchView, LinearTarget, LoraState
from vexpert.ops.backend import LoraBackend

TOKENS = "tokens"  # a router's rows are those of every dense layer


class _AddToLogits(TorchFunctionMode):
    """While entered, adds the delta to the result of F.linear, before anything reads it."""

    def __init__(self, delta: SiteDelta, view: BatchView) -> None:
        super().__init__()
        self.delta = delta
        self.view = view
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.calls += 1
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
            self._add(given["input"], given.get("bias"), result)
        return result

    def _add(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        site = self.delta.site
        groups = self.delta.shared_group(self.view, TOKENS, self.view.slots)
        rows = x.reshape(-1, site.in_features)
        self.delta.add(self.view, groups, rows, y.view(-1, site.out_features), bias=bias)


def wrap_router(
    module: nn.Module, target: LinearTarget, state: LoraState, backend: LoraBackend
) -> nn.Module:
    """Make `module`, changed in place and returned, add its adapters' deltas to its logits.

    Its forward must compute them with one F.linear call; UnsupportedError at the first step that
    adapts it if it does not. Steps that do not adapt it run the module's own forward, nothing else.
    """
    delta = SiteDelta(target.site, state, backend)
    own_forward = module.forward

    def is_adapted() -> bool:
        return state.view is not None and delta.is_adapted(state.view)

    # PyTorch types a module's attributes as tensors and modules.
    module.vexpert_adapted = is_adapted  # type: ignore[assignment]

    @functools.wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        view = state.view
        if view is None or not delta.is_adapted(view):
            return own_forward(*args, **kwargs)
        with _AddToLogits(delta, view) as mode:
            result = own_forward(*args, **kwargs)
        if mode.calls != 1:
            raise UnsupportedError(
                f"{target.path}: {type(module).__name__} calls F.linear {mode.calls} times, not "
                "once; adapters of this router cannot be served"
            )
        return result

    module.forward = forward
    return module
