"""The likeliest token of each row of logits, in one launch; the vocabulary is split over programs.

  tokens[t] = the first i of the largest logits[t, i]; -1: one is NaN or +inf, or none is finite
Each program finds the best of its part; of a row's programs the last to arrive compares them. A
logit and its place are one integer, so that the order of the programs does not matter:
  (bits of the logit, in the order of the numbers) * 2^32 + (2^31 - 1 - i)

| array | shape | holds |
|---|---|---|
| logits | [T, V] float | columns adjacent |
| copy | [T, V] float or None | the logits again; columns adjacent |
| best | [T * S] int64 | scratch: of each row's S parts |
| arrivals | [T] int32 | scratch; zeros before and after |
| tokens | [T] int64 | |
| told | [P, M] int64 or None | pinned on the host; the tokens again, at row (turn - 1) mod P |
| turn | [1] int64 | with `told` |
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import (
    ceil_div,
    check_matrix,
    pdl_options,
    pdl_release,
    pdl_wait,
    power_of_two,
)
from vexpert.kernels.launch import direct_launch

BLOCK = 4096  # logits of a program
LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))
BAD: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # above the bits of every number
NO_NUMBER: tl.constexpr = tl.constexpr(-0x7F800001)  # bits of -inf


@dataclass(frozen=True)
class Scratch:
    """Arrays that launches use one after another; both may be longer than a launch needs."""

    best: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device, block: int = BLOCK) -> "Scratch":
        """For up to `rows` rows."""
        best = torch.empty(rows * ceil_div(vocab, block), dtype=torch.int64, device=device)
        return cls(best, torch.zeros(rows, dtype=torch.int32, device=device))

    def holds(self, rows: int, vocab: int, block: int = BLOCK) -> bool:
        """Whether `rows` rows fit."""
        needed = rows * ceil_div(vocab, block)
        return needed <= self.best.shape[0] and rows <= self.arrivals.shape[0]


@direct_launch
@triton.jit
def _argmax_kernel(
    logits,
    copy,
    best,
    arrivals,
    tokens,
    told,
    turn,
    stride,
    stride_copy,
    stride_told,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COPY: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    i = split * BLOCK + tl.arange(0, BLOCK)
    inside = i < VOCAB
    pdl_release(PDL)
    pdl_wait(PDL)
    raw = tl.load(logits + row * stride + i, mask=inside, other=float("-inf"))
    if COPY:
        tl.store(copy + row * stride_copy + i, raw, mask=inside)
    x = raw.to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # one zero
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where((x != x) | (x == float("inf")), BAD, key)
    found = tl.max((key.to(tl.int64) << 32) + (0x7FFFFFFF - i), 0)
    best += row * SPLITS
    tl.store(best + split, found)
    tl.debug_barrier()  # what this program found comes before its arrival
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(arrivals + row, 0)
        part = tl.arange(0, PARTS)
        # Not through the L1 cache: other programs wrote them.
        every = tl.load(best + part, mask=part < SPLITS, other=LOWEST, cache_modifier=".cg")
        most = tl.max(every, 0)
        largest = most >> 32
        token = 0x7FFFFFFF - (most & 0x7FFFFFFF)
        token = tl.where((largest == BAD) | (largest == NO_NUMBER), -1, token)
        tl.store(tokens + row, token)
        if PLACES > 0:
            place = (tl.load(turn) - 1) % PLACES
            tl.store(told + place * stride_told + row, token)


def argmax_rows(
    logits: torch.Tensor,
    scratch: Scratch,
    tokens: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
    told: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    block: int = BLOCK,
    pdl: bool = False,
) -> torch.Tensor:
    """`tokens` [T] int64 of logits [T, V]; given, it is written in place, as `copy` and `told` are.

    `told` and `turn` go together. The scratch may be another launch's once this one has ended;
    `block`: logits of a program. No launch if T is 0. Reference: `reference_argmax_rows`.
    """
    check_matrix("logits", logits)
    rows, vocab = logits.shape
    splits = ceil_div(vocab, block)
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    assert tokens.shape == (rows,), (tokens.shape, rows)
    assert tokens.is_contiguous(), tokens.stride()
    assert scratch.holds(rows, vocab, block), (scratch.best.shape, scratch.arrivals.shape, rows)
    if copy is not None:
        check_matrix("copy", copy)
        assert copy.shape == logits.shape, (copy.shape, logits.shape)
        assert copy.dtype == logits.dtype, (copy.dtype, logits.dtype)
    assert (told is None) == (turn is None), (told, turn)
    assert told is None or told.shape[1] >= rows, (told, rows)
    if rows == 0:
        return tokens
    _argmax_kernel[(rows * splits,)](
        logits, logits if copy is None else copy, scratch.best, scratch.arrivals, tokens,
        tokens if told is None else told, tokens if turn is None else turn, logits.stride(0),
        0 if copy is None else copy.stride(0), 0 if told is None else told.stride(0),
        VOCAB=vocab, SPLITS=splits, PARTS=power_of_two(splits, 1, 1 << 16), COPY=copy is not None,
        PLACES=0 if told is None else told.shape[0], BLOCK=block,
        num_warps=power_of_two(block // 512, 1, 8), **pdl_options(pdl),
    )  # fmt: skip
    return tokens


def reference_argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """The same in PyTorch."""
    tokens = logits.argmax(-1, keepdim=True)  # of a row with NaN: the place of the NaN
    return torch.where(logits.gather(1, tokens).isfinite(), tokens, -1)[:, 0]
