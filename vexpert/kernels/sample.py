"""One token of each row, by the inverse of its cumulative distribution, cut by min-p, top-k, top-p.

With s = logits[row] / temperature, m = max s, w = exp(s - m):
  valid:  s >= m + log_min_p
  top-k:  the k largest of the valid; of equal ones the first
  top-p:  of these, largest first, as long as the w before are less than top_p times their sum
  token = the first i with sum of the kept w[0 .. i] > uniform * sum of all kept w

A program takes one row and reads it some times over; it lies in the L2 cache. Where to cut is found
by bisection on the bits of s, whose order as integers is that of the numbers: 8 parts a pass.

| array | shape | holds |
|---|---|---|
| logits | [n, V] float | columns adjacent |
| rows | [d] int64 | rows of logits that are drawn from |
| temperature | [d] float32 | > 0 |
| log_min_p | [d] float32 | log(min_p); -inf: off |
| top_k | [d] int64 | V or more: off |
| top_p | [d] float64 | 1 or more: off |
| uniforms | [d] float64 | of [0, 1) |
| tokens | [n] int64 | of rows drawn from; -1: a logit is NaN or +inf, or none is finite |
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import check_matrix
from vexpert.kernels.launch import direct_launch

BLOCK = 2048
NUM_WARPS = 16  # more have too few registers each
# Loads under way: without them a row is read at the latency of L2.
STAGES: tl.constexpr = tl.constexpr(3)
NO_KEY: tl.constexpr = tl.constexpr(-(1 << 31))  # of what is not valid; below every other


class SampleLimits(NamedTuple):
    """The options of d rows; see the table above."""

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


@triton.jit
def _key(s):
    """Bits of s, float32, as an int32 in the order of the numbers."""
    bits = s.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row, start, vocab, temperature, floor, BLOCK: tl.constexpr):
    """s of a block, and its keys; NO_KEY below `floor`."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    s = tl.math.div_rn(x, temperature)
    s = tl.where(s == 0.0, 0.0, s)  # one zero: -0.0 has other bits
    is_valid = (s >= floor) & (s > float("-inf"))
    return s, tl.where(is_valid, _key(s), NO_KEY)


@triton.jit
def _largest(row, vocab, temperature, BLOCK: tl.constexpr):
    """The largest s, and how many logits are NaN or +inf."""
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        bad += ((x != x) | (x == float("inf"))).to(tl.int32)
        most = tl.maximum(most, tl.math.div_rn(x, temperature))
    m = tl.max(most, 0)
    return tl.where(m == 0.0, 0.0, m), tl.sum(bad, 0)


@triton.jit
def _border(low, high, part, step):
    return tl.minimum(low + part * step, high).to(tl.int32)


@triton.jit
def _find_key(row, vocab, temperature, floor, m, low, wanted, by_mass, BLOCK: tl.constexpr):
    """The largest key from `low` on such that keys from it on number, or weigh, `wanted` or more.

    `low` itself if there is none. Each lane has its own sums until the row's end. Where one key
    alone lies between the bounds, it is the one: logits of few bits are soon there.
    """
    high = _key(m).to(tl.int64) + 1
    is_found = False
    while (high - low > 1) & (not is_found):
        lowest, highest = low.to(tl.int32), (high - 1).to(tl.int32)
        first = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        last = tl.full((BLOCK,), NO_KEY, tl.int32)
        step = (high - low + 7) // 8
        b1, b2 = _border(low, high, 1, step), _border(low, high, 2, step)
        b3, b4 = _border(low, high, 3, step), _border(low, high, 4, step)
        b5, b6 = _border(low, high, 5, step), _border(low, high, 6, step)
        b7 = _border(low, high, 7, step)
        none = tl.zeros((BLOCK,), dtype=tl.float64)
        f1, f2, f3, f4, f5, f6, f7 = none, none, none, none, none, none, none
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            s, key = _load(row, start, vocab, temperature, floor, BLOCK)
            inside = (key >= lowest) & (key <= highest)
            first = tl.minimum(first, tl.where(inside, key, 0x7FFFFFFF))
            last = tl.maximum(last, tl.where(inside, key, NO_KEY))
            value = tl.where(by_mass, tl.exp(s - m), 1.0).to(tl.float64)
            f1 += tl.where(key >= b1, value, 0.0)
            f2 += tl.where(key >= b2, value, 0.0)
            f3 += tl.where(key >= b3, value, 0.0)
            f4 += tl.where(key >= b4, value, 0.0)
            f5 += tl.where(key >= b5, value, 0.0)
            f6 += tl.where(key >= b6, value, 0.0)
            f7 += tl.where(key >= b7, value, 0.0)
        # The sums fall from part to part, so those that reach `wanted` are the first ones.
        enough = (tl.sum(f1, 0) >= wanted).to(tl.int64) + (tl.sum(f2, 0) >= wanted).to(tl.int64)
        enough += (tl.sum(f3, 0) >= wanted).to(tl.int64) + (tl.sum(f4, 0) >= wanted).to(tl.int64)
        enough += (tl.sum(f5, 0) >= wanted).to(tl.int64) + (tl.sum(f6, 0) >= wanted).to(tl.int64)
        enough += (tl.sum(f7, 0) >= wanted).to(tl.int64)
        low += enough * step
        high = tl.minimum(high, low + step)
        only, other = tl.min(first, 0), tl.max(last, 0)
        is_found = only == other
        low = tl.where(is_found, only.to(tl.int64), low)
    return low


@triton.jit
def _split(row, vocab, temperature, floor, m, cut, BLOCK: tl.constexpr):
    """Number and weight of the keys above `cut`, and the number and weight of one at it."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        s, key = _load(row, start, vocab, temperature, floor, BLOCK)
        w = tl.exp(s - m)
        above, at = key > cut, key == cut
        count += above.to(tl.int32)
        mass += tl.where(above, w, 0.0).to(tl.float64)
        equal += at.to(tl.int32)
        weight = tl.maximum(weight, tl.where(at, w, 0.0))
    number, ties = tl.sum(count, 0).to(tl.int64), tl.sum(equal, 0).to(tl.int64)
    return number, tl.sum(mass, 0), ties, tl.max(weight, 0).to(tl.float64)


@triton.jit
def _find_tie(row, vocab, temperature, floor, cut, ties, BLOCK: tl.constexpr):
    """Where the last of the first `ties` keys at the cut is; -1: there is none."""
    seen = tl.zeros((), dtype=tl.int64)
    last = tl.full((), -1, tl.int64)
    start = 0
    while (seen < ties) & (start < vocab):
        _, key = _load(row, start, vocab, temperature, floor, BLOCK)
        at = (key == cut).to(tl.int32)
        count = tl.sum(at, 0)
        if seen + count >= ties:
            is_it = (at > 0) & (seen + tl.cumsum(at, 0) == ties)
            last = tl.max(tl.where(is_it, start + tl.arange(0, BLOCK), -1), 0).to(tl.int64)
        seen += count
        start += BLOCK
    return last


@triton.jit
def _kept(row, start, vocab, temperature, floor, m, cut, last_tie, BLOCK: tl.constexpr):
    """Weights of a block's kept tokens, zero for others, float64."""
    s, key = _load(row, start, vocab, temperature, floor, BLOCK)
    at = start + tl.arange(0, BLOCK)
    keep = (key > cut) | ((key == cut) & (at <= last_tie))
    return tl.where(keep, tl.exp(s - m), 0.0).to(tl.float64)


@direct_launch
@triton.jit
def _sample_kernel(
    logits, rows, temperatures, log_min_ps, top_ks, top_ps, uniforms, tokens, vocab, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(rows + program)
    row = logits + index * stride
    tokens += index
    temperature = tl.load(temperatures + program)
    m, bad = _largest(row, vocab, temperature, BLOCK)
    if (bad > 0) | (m == float("-inf")):
        tl.store(tokens, -1)
        return
    floor = m + tl.load(log_min_ps + program)
    cut = tl.full((), NO_KEY + 1, tl.int64)  # below every valid key
    ties = tl.zeros((), dtype=tl.int64)
    last_tie = tl.full((), -1, tl.int64)
    mass = tl.zeros((), dtype=tl.float64)  # of what is kept
    top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)
    # All, then top-k, then top-p: a loop, so that its body is compiled once. All need not be
    # weighed where nothing is cut.
    is_cut = (top_k < vocab) | (top_p < 1.0)
    for phase in range(3):
        is_on = (phase == 0) | ((phase == 1) & (top_k < vocab)) | ((phase == 2) & (top_p < 1.0))
        if is_on & is_cut:
            wanted = tl.where(phase == 2, top_p * mass, top_k.to(tl.float64))
            last = cut
            if phase > 0:
                cut = _find_key(row, vocab, temperature, floor, m, cut, wanted, phase == 2, BLOCK)
            count, above, equal, weight = _split(row, vocab, temperature, floor, m, cut, BLOCK)
            # Without a key at the cut, as at first, the number is of no use.
            by_mass = tl.ceil((wanted - above) / tl.where(weight > 0, weight, 1.0)).to(tl.int64)
            needed = tl.where(phase == 2, tl.maximum(by_mass, 1), top_k - count)
            most = tl.where((phase == 2) & (cut == last), ties, equal)
            ties = tl.maximum(tl.minimum(needed, most), 0)
            last_tie = tl.where(ties < equal, -1, vocab).to(tl.int64)
            mass = above + ties.to(tl.float64) * weight
    if (last_tie < 0) & (ties > 0):
        last_tie = _find_tie(row, vocab, temperature, floor, cut, ties, BLOCK)
    # In one order here and below: the last sum is the total, which is above the target.
    total = tl.zeros((), dtype=tl.float64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        total += tl.sum(_kept(row, start, vocab, temperature, floor, m, cut, last_tie, BLOCK), 0)
    target = tl.load(uniforms + program) * total
    before = tl.zeros((), dtype=tl.float64)
    token = tl.full((), -1, tl.int64)
    start = 0
    while (token < 0) & (start < vocab):
        w = _kept(row, start, vocab, temperature, floor, m, cut, last_tie, BLOCK)
        after = before + tl.sum(w, 0)
        if after > target:
            reached = before + tl.cumsum(w, 0) > target
            at = start + tl.arange(0, BLOCK)
            first = tl.min(tl.where(reached & (w > 0.0), at, vocab), 0)
            # The running sum may be rounded otherwise, and end short of the target.
            last_kept = tl.max(tl.where(w > 0.0, at, 0), 0)
            token = tl.minimum(first, last_kept).to(tl.int64)
        before = after
        start += BLOCK
    tl.store(tokens, token)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    limits: SampleLimits,
    uniforms: torch.Tensor,
    tokens: torch.Tensor,
    block: int = BLOCK,
) -> None:
    """Change `tokens` [n] int64 in place at `rows`; other rows' stay.

    `block`: logits of a step. Reference: `engine.sampler._draw`, of the same uniforms.
    """
    check_matrix("logits", logits)
    assert tokens.shape == logits.shape[:1], (tokens.shape, logits.shape)
    assert tokens.is_contiguous(), tokens.stride()
    assert limits.top_p.dtype == uniforms.dtype == torch.float64, (limits.top_p.dtype, uniforms)
    _sample_kernel[(rows.shape[0],)](
        logits,
        rows,
        *limits,
        uniforms,
        tokens,
        logits.shape[1],
        logits.stride(0),
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
