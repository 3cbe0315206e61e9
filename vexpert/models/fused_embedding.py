"""The embedding with what follows it: the first norm and the rotary angles, one launch a step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from vexpert.kernels.embed import embed
from vexpert.lora.layers import LoraEmbedding
from vexpert.models.attention import StepContext
from vexpert.models.fused_norm import FusedNorm
from vexpert.models.fused_record import Records
from vexpert.models.fused_rotary import FusedRotary


class FusedEmbedding:
    """The forward of one embedding: token ids [1, T] -> [1, T, W].

    The norm of its output and the angles of the step's positions are left to who reads them.
    """

    def __init__(self, norm: FusedNorm, rotary: FusedRotary | None, pdl: bool) -> None:
        self.norm = norm
        self.rotary = rotary
        self.pdl = pdl
        self.module: Any = None
        self.own: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.context: StepContext | None = None

    def install(self, module: nn.Module, context: StepContext) -> None:
        """Replace the forward of `module`, a plain embedding or one with LoRA."""
        assert type(module) in (nn.Embedding, LoraEmbedding), type(module)
        self.module, self.own, self.context = module, module.forward, context
        module.forward = self

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        assert self.own is not None
        if self._is_adapted():
            return self.own(input)
        plan = None if self.context is None else self.context.plan
        positions = None if plan is None or self.rotary is None else plan.step.positions
        given = None
        if positions is not None and self.rotary is not None:
            given = self.rotary.angles
        found = embed(
            *(input.reshape(-1), self.module.weight, self.norm.norm, positions, given), self.pdl
        )
        hidden = found.hidden.view(*input.shape, -1)
        self.norm.ahead = hidden, found.normed.view(hidden.shape)
        if found.angles is not None and positions is not None and self.rotary is not None:
            self.rotary.ahead = positions, found.angles
        return hidden

    def _is_adapted(self) -> bool:
        """Whether an adapter of the step changes the embedding."""
        if not isinstance(self.module, LoraEmbedding):
            return False
        delta = self.module.delta
        return delta.state.view is not None and delta.is_adapted(delta.state.view)


def recognise_embedding(
    module: nn.Module,
    records: Records,
    norms: Mapping[nn.Module, FusedNorm],
    rotaries: Mapping[nn.Module, FusedRotary],
    pdl: bool,
) -> FusedEmbedding | str:
    """`module` fused, or why it is not."""
    call = records.only(module)
    if type(module) is not nn.Embedding or module.max_norm is not None:
        return "it is not a plain look-up"
    if call is None or call.hidden.dim() != 2:
        return "it is not called once with token ids"
    readers = [
        norm
        for each, norm in norms.items()
        if (read := records.only(each)) is not None and read.hidden is call.output
    ]
    if len(readers) != 1 or readers[0].dtype is not module.weight.dtype:
        return "no norm reads it as it is"
    rotary = next(iter(rotaries.values())) if len(rotaries) == 1 else None
    return FusedEmbedding(readers[0], rotary, pdl)
