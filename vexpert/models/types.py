"""What the engine knows of a model: its facts, one step's input, and the calls it answers."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vexpert.lora.types import BatchView, LoraState, TargetMap


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a loaded model."""

    name: str
    model_type: str
    vocab_size: int  # columns of the logits
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    cache_bytes_per_token: int  # all layers


@dataclass(frozen=True)
class StepInput:
    """All tokens of one step, sequences one after another; prefill chunks and decodes mixed."""

    token_ids: torch.Tensor  # [T] int64, on the device
    positions: torch.Tensor  # [T] int64, on the device
    query_lens: tuple[int, ...]  # tokens of each sequence in this step; their sum is T
    context_lens: tuple[int, ...]  # tokens of each sequence in the cache after this step
    block_tables: (
        torch.Tensor
    )  # [B, max_blocks] int64, on the device; block ids, tail arbitrary but valid
    cache_rows: torch.Tensor  # [T] int64: block * block_size + offset where each token's KV goes
    logit_rows: torch.Tensor  # [n] int64: rows of the step whose logits are wanted
    lora: BatchView | None


class ServedModel(Protocol):
    """A model the engine can run."""

    info: ModelInfo
    targets: TargetMap
    lora: LoraState

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache of every layer; called once."""

    def parameter(self, name: str) -> torch.Tensor | None:
        """A parameter or buffer of the model by its name in transformers; None: there is none."""

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [n, vocab_size] float32 of `step.logit_rows`; writes the step's KV in place."""
