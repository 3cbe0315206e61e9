"""Before an engine is ready: kernels compiled, decode graphs captured, so no request waits for it.

Which tiles a kernel is compiled for depends on how many rows a step has; a choice holds for a
factor of four rows at least (`ops/moe_plans.json`), so powers of four meet them all.
"""

import time

import torch

from vexpert.engine.graphs import DecodeGraphs
from vexpert.log import get_logger
from vexpert.lora.types import BatchView, LoraSignature
from vexpert.models.types import ServedModel, StepInput

logger = get_logger(__name__)

RANK = 16  # of the adapters whose kernels are compiled; others compile some at their first use
COUNTS = (1, 32)  # active adapters: one has runs of many rows, many have few


def step_sizes(most: int) -> list[int]:
    """Rows of the steps to run, ascending; `most` is the last."""
    return [*(4**i for i in range(most.bit_length()) if 4**i < most), most]


def warm_up(
    model: ServedModel,
    graphs: DecodeGraphs | None,
    num_blocks: int,
    block_size: int,
    most_tokens: int,
    most_rows: int,
    scope: str = "all",
) -> None:
    """Compile kernels on a GPU, then capture graphs; logs the time. The cache must be empty.

    `scope`: "all"; "decode": no prompts; "none": graphs alone, with the kernels that they need.
    """
    began = time.monotonic()
    with torch.inference_mode():
        if model.info.device.type == "cuda":
            from vexpert.kernels.compile_ahead import compile_only  # needs Triton

            sizes = num_blocks, block_size, most_tokens if scope == "all" else 0, most_rows
            with compile_only():
                if graphs is not None:
                    graphs.rehearse()
                if scope != "none":
                    run_steps(model, *sizes)
            _synchronize(model)
            logger.info("warm-up: kernels compiled in %.1f s", time.monotonic() - began)
            if scope != "none":
                run_steps(model, *sizes)
        _synchronize(model)
        compiled = time.monotonic()
        if graphs is not None:
            graphs.warm_up()
            _synchronize(model)
    captured = time.monotonic()
    logger.info(
        "warm-up: %.1f s for kernels, %.1f s for %d graphs of decode steps",
        *(compiled - began, captured - compiled, 0 if graphs is None else graphs.num_captured),
    )


def run_steps(
    model: ServedModel, num_blocks: int, block_size: int, most_tokens: int, most_rows: int
) -> None:
    """Run decode steps of up to `most_rows`, and prompts of up to `most_tokens`, 0 for none.

    With LoRA's kernels too if the model has tables. What these steps write to the cache no request
    can see.
    """
    steps = _Steps(model, num_blocks * block_size, block_size)
    most_rows, most_tokens = min(most_rows, num_blocks), min(most_tokens, num_blocks * block_size)
    rows = step_sizes(most_rows)
    # Below most_rows a prompt has the kernels of a decode step, but for its attention.
    prompts = [n for n in step_sizes(most_tokens) if n in (4, most_tokens) or n > most_rows]
    for signature in _signatures(model):
        began = time.monotonic()
        for count in rows:
            model.forward(steps.decode(count, signature))
        for tokens in prompts if most_tokens else ():
            model.forward(steps.prompt(tokens, signature))
        _synchronize(model)
        what = "base" if signature is None else f"LoRA, up to {signature.adapters} adapters"
        logger.info("warm-up, %s: steps run in %.1f s", what, time.monotonic() - began)


def _signatures(model: ServedModel) -> list[LoraSignature | None]:
    """Without LoRA, and with adapters of one rank on every site."""
    if model.lora.tables is None:
        return [None]
    ranks = tuple(RANK * len(site.slices) for site in model.targets.sites)
    return [None, *(LoraSignature(ranks, count) for count in COUNTS)]


def _synchronize(model: ServedModel) -> None:
    if model.info.device.type == "cuda":
        torch.cuda.synchronize(model.info.device)


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
