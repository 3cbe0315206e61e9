"""What the engine knows of a model: its facts, one step's input, and the calls it answers."""

from dataclasses import dataclass
from typing import Protocol

import torch

from vexpert.lora.types import BatchView, LoraState, TargetMap
from vexpert.ops.attention import AttentionBatch


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
    logits_dtype: torch.dtype = torch.float32  # of `raw_logits`; on a GPU that, but for odd heads


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
    query_starts: torch.Tensor | None = None  # [B + 1] int64, on the device: sums of query_lens
    kv_lens: torch.Tensor | None = None  # [B] int64, on the device: context_lens
    wants_all: bool = False  # whether `logit_rows` are all rows of the step, in order

    def attention_batch(self, block_size: int) -> AttentionBatch:
        """The step as attention kernels take it; makes the device arrays if they are not given."""
        device = self.positions.device
        starts, lens = self.query_starts, self.kv_lens
        if starts is None:
            counts = torch.tensor((0, *self.query_lens), device=device)
            starts = counts.cumsum(0)
        if lens is None:
            lens = torch.tensor(self.context_lens, device=device)
        return AttentionBatch(
            query_starts=starts,
            kv_lens=lens,
            block_tables=self.block_tables,
            block_size=block_size,
            max_query_len=max(self.query_lens),
            max_kv_len=max(self.context_lens),
        )


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

    def raw_logits(self, step: StepInput) -> torch.Tensor:
        """The same in `info.logits_dtype`."""

    def why_not_captured(self) -> str | None:
        """Why a step of one token a sequence cannot become a CUDA graph, or None."""
