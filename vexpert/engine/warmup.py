"""Before an engine is ready: kernels compiled, decode graphs captured, so no request waits for it.

Which kernel a step runs depends on how many rows it has, through plans that are data and through
tiles that are powers of two; so steps of each power of two meet them all.
"""

import time
from dataclasses import dataclass

import torch

from vexpert.engine.graphs import DecodeGraphs
from vexpert.engine.sampler import Sampler
from vexpert.log import get_logger
from vexpert.lora.types import BatchView, EmbeddingTarget, LinearTarget, LoraSignature, TargetMap
from vexpert.models.types import ServedModel, StepInput

logger = get_logger(__name__)

RANK = 16  # of the adapters whose kernels are compiled; others compile some at their first use
COUNTS = (1, 32)  # active adapters: one has runs of many rows, many have few
MIB = 2**20


@dataclass(frozen=True)
class WarmUp:
    """How much of it: steps of up to so many tokens of prompts, and rows of decode steps."""

    num_blocks: int
    block_size: int
    most_tokens: int
    most_rows: int
    scope: str = "all"  # "decode": no prompts; "none": graphs alone, with the kernels they need


def powers(most: int) -> list[int]:
    """1, 2, 4 .. up to `most`, which is the last."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most] if most else []


def warm_up(
    model: ServedModel, graphs: DecodeGraphs | None, sampler: Sampler, extent: WarmUp
) -> None:
    """Compile kernels on a GPU, then capture graphs; logs the time. The cache must be empty."""
    began = time.monotonic()
    with torch.inference_mode():
        if model.info.device.type == "cuda":
            from vexpert.kernels.compile_ahead import compile_only  # needs Triton

            with compile_only():
                sampler.rehearse(model.info)
                if graphs is not None:
                    graphs.rehearse()
                run_steps(model, extent)
            _synchronize(model)
            logger.info("warm-up: kernels compiled in %.1f s", time.monotonic() - began)
            run_steps(model, extent, only_last=True)
        if graphs is not None:
            _capture(model, graphs)


def _capture(model: ServedModel, graphs: DecodeGraphs) -> None:
    began, free = time.monotonic(), _free_bytes(model)
    graphs.warm_up()
    _synchronize(model)
    taken = (free - _free_bytes(model)) / MIB
    logger.info(
        "warm-up: %d graphs of decode steps captured in %.1f s, %.1f MiB",
        *(graphs.num_captured, time.monotonic() - began, taken),
    )


def run_steps(model: ServedModel, extent: WarmUp, only_last: bool = False) -> None:
    """Run decode steps and prompts, with LoRA's kernels too if the model has tables.

    `only_last`: the largest of both. What these steps write to the cache no request can see.
    """
    if extent.scope == "none":
        return
    cache_rows = extent.num_blocks * extent.block_size
    steps = _Steps(model, cache_rows, extent.block_size)
    most_rows = min(extent.most_rows, extent.num_blocks)
    most_tokens = min(extent.most_tokens, cache_rows) if extent.scope == "all" else 0
    # Below most_rows a prompt has the kernels of a decode step, but for its attention.
    rows = powers(most_rows)
    prompts = [n for n in powers(most_tokens) if n in (4, most_tokens) or n > most_rows]
    if only_last:
        rows, prompts = rows[-1:], prompts[-1:]
    for signature in _signatures(model):
        began = time.monotonic()
        for count in rows:
            model.forward(steps.decode(count, signature))
        for tokens in prompts:
            model.forward(steps.prompt(tokens, signature))
        what = "base" if signature is None else f"LoRA, up to {signature.adapters} adapters"
        logger.info("warm-up, %s: steps begun in %.1f s", what, time.monotonic() - began)


def _signatures(model: ServedModel) -> list[LoraSignature | None]:
    """Without LoRA, and with adapters of one rank on the sites that most adapters have."""
    if model.lora.tables is None:
        return [None]
    rare = _rare_sites(model.targets, model.info.vocab_size)
    ranks = tuple(
        0 if site.index in rare else RANK * len(site.slices) for site in model.targets.sites
    )
    return [None, *(LoraSignature(ranks, count) for count in COUNTS)]


def _rare_sites(targets: TargetMap, vocab_size: int) -> set[int]:
    """Sites of embeddings and of the head."""
    return {
        target.site.index
        for target in targets.targets.values()
        if isinstance(target, EmbeddingTarget)
        or (isinstance(target, LinearTarget) and target.out_features == vocab_size)
    }


def _synchronize(model: ServedModel) -> None:
    if model.info.device.type == "cuda":
        torch.cuda.synchronize(model.info.device)


def _free_bytes(model: ServedModel) -> int:
    is_cuda = model.info.device.type == "cuda"
    return torch.cuda.mem_get_info(model.info.device)[0] if is_cuda else 0


class _Steps:
    """Steps over the first rows of the cache. Their LoRA views have kernels, and no adapter."""

    def __init__(self, model: ServedModel, cache_rows: int, block_size: int) -> None:
        self._device = model.info.device
        self._longest = min(model.info.max_model_len, cache_rows)
        self._block_size = block_size

    def prompt(self, tokens: int, signature: LoraSignature | None) -> StepInput:
        """One prompt, or more where the model's limit asks for it."""
        lens = [self._longest] * (tokens // self._longest)
        return self._step([*lens, tokens % self._longest], signature)

    def decode(self, rows: int, signature: LoraSignature | None) -> StepInput:
        """Sequences of one token."""
        return self._step([1] * rows, signature)

    def _step(self, lens: list[int], signature: LoraSignature | None) -> StepInput:
        lens = [length for length in lens if length]
        size, device = self._block_size, self._device
        blocks = [-(-length // size) for length in lens]
        width = max(blocks)
        firsts = torch.tensor([0, *blocks]).cumsum(0)[:-1]
        tables = firsts[:, None] + torch.arange(width).clamp(max=torch.tensor(blocks)[:, None] - 1)
        positions = torch.cat([torch.arange(length) for length in lens])
        sequence = torch.repeat_interleave(torch.tensor(lens))
        cache_rows = tables[sequence, positions // size] * size + positions % size
        ends = torch.tensor(lens).cumsum(0)
        return StepInput(
            token_ids=torch.zeros_like(positions).to(device),
            positions=positions.to(device),
            query_lens=tuple(lens),
            context_lens=tuple(lens),
            block_tables=tables.to(device),
            cache_rows=cache_rows.to(device),
            logit_rows=(ends - 1).to(device),
            query_starts=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device),
            kv_lens=torch.tensor(lens, device=device),
            lora=self._view(len(positions), len(lens), signature),
        )

    def _view(self, rows: int, sequences: int, signature: LoraSignature | None) -> BatchView | None:
        if signature is None:
            return None
        slots = torch.full((rows,), -1, device=self._device)
        return BatchView(slots, slots[:sequences], (0,), True, signature)
