"""A transformers model as the engine sees it: facts, targets, cache and forward."""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from vexpert.lora.types import LoraState, TargetMap
from vexpert.models.attention import AttentionLayer, StepContext
from vexpert.models.cache import StepCache
from vexpert.models.plan import StepPlan
from vexpert.models.types import ModelInfo, StepInput


@dataclass
class TransformersModel:
    """Implements ServedModel. One thread at a time may run it; several models may run at once."""

    info: ModelInfo
    targets: TargetMap
    lora: LoraState
    model: Any
    layers: list[AttentionLayer]
    context: StepContext
    cache: StepCache
    cache_name: str  # the model's keyword for its cache
    block_size: int = 0
    products: AbstractContextManager[object] = field(default_factory=nullcontext)  # round forward

    @functools.cached_property
    def _parameters(self) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = dict(self.model.named_buffers(remove_duplicate=False))
        return named | dict(self.model.named_parameters(remove_duplicate=False))

    def parameter(self, name: str) -> torch.Tensor | None:
        """A parameter or buffer of the model by its name in transformers; None: there is none."""
        return self._parameters.get(name)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache of every layer; called once."""
        assert not self.block_size, "the cache is already allocated"
        self.block_size = block_size
        for layer in self.layers:
            layer.allocate(num_blocks, block_size, self.info.dtype, self.info.device)

    def why_not_captured(self) -> str | None:
        """Why a step of one token a sequence cannot become a CUDA graph, or None."""
        return None

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [n, vocab_size] float32 of `step.logit_rows`; writes the step's KV in place."""
        return self.raw_logits(step).float()

    @torch.inference_mode()
    def raw_logits(self, step: StepInput) -> torch.Tensor:
        """The same in `info.logits_dtype`."""
        assert self.block_size, "allocate_cache comes first"
        self.context.plan = StepPlan(step, self.block_size)
        self.lora.set_view(step.lora)
        inputs = {
            "input_ids": step.token_ids[None],
            "position_ids": step.positions[None],
            "logits_to_keep": 0 if step.wants_all else step.logit_rows,  # 0: all, without a copy
            "use_cache": False,
            self.cache_name: self.cache,
        }
        try:
            with self.products:
                logits: torch.Tensor = self.model(**inputs).logits
        finally:
            self.context.plan = None
            self.lora.set_view(None)
        return logits[0]
