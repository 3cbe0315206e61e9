"""One token of each row, by the inverse of its cumulative distribution, cut by min-p, top-k, top-p.

With s = logits[row] / temperature, m = max s, w = exp(s - m):
  valid:  s >= m + log_min_p
  top-k:  the k largest of the valid; of equal ones the first
  top-p:  of these, largest first, as long as the w before are less than top_p times their sum
  token = the first i with sum of the kept w[0 .. i] > uniform * sum of all kept w

A program takes one row and reads it some times over; it lies in the L2 cache. Where to cut is found
by bisection on the bits of s, whose order as integers is that of the numbers: 16 parts a pass.

| array | shape | holds |
|---|---|---|
| logits | [n, V] | columns adjacent |
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

BLOCK = 1024
NUM_WARPS = 8
# Loads under way: without them a row is read at the latency of L2. More of them spill registers.
STAGES: tl.constexpr = tl.constexpr(3)


class SampleLimits(NamedTuple):
    """The options of d rows; see the table above."""

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


@triton.jit
def _load(row, start, vocab, temperature, floor, BLOCK: tl.constexpr):
    """s of a block, and its integers in the order of s; below `floor` the least integer."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    s = tl.math.div_rn(x, temperature)
    s = tl.where(s == 0.0, 0.0, s)  # one zero: -0.0 has other bits
    bits = s.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    is_valid = (s >= floor) & (s > float("-inf"))
    return s, tl.where(is_valid, key, -(1 << 31))


@triton.jit
def _find_key(row, vocab, temperature, floor, m, low, wanted, by_mass, BLOCK: tl.constexpr):
    """The largest key from `low` on such that keys from it on number, or weigh, `wanted` or more.

    `low` itself if there is none.
    """
    top = m.to(tl.int32, bitcast=True)
    high = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.int64) + 1
    part = tl.arange(0, 16).to(tl.int64)
    while high - low > 1:
        step = (high - low + 15) // 16
        border = low + part * step
        found = tl.zeros((16,), dtype=tl.float64)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            s, key = _load(row, start, vocab, temperature, floor, BLOCK)
            value = tl.where(by_mass, tl.exp(s - m), 1.0)
            inside = key[:, None] >= border[None, :]
            found += tl.sum(tl.where(inside, value[:, None], 0.0), 0).to(tl.float64)
        # The sums fall from part to part, so those that reach `wanted` are the first ones.
        enough = tl.sum(((found >= wanted) & (part > 0)).to(tl.int64), 0)
        low += enough * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _split(row, vocab, temperature, floor, m, cut, BLOCK: tl.constexpr):
    """Number and weight of the keys above `cut`, and the number and weight of one at it."""
    count = tl.zeros((), dtype=tl.int64)
    mass = tl.zeros((), dtype=tl.float64)
    equal = tl.zeros((), dtype=tl.int64)
    weight = tl.zeros((), dtype=tl.float64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        s, key = _load(row, start, vocab, temperature, floor, BLOCK)
        w = tl.exp(s - m)
        above, at = key > cut, key == cut
        count += tl.sum(above.to(tl.int64), 0)
        mass += tl.sum(tl.where(above, w, 0.0), 0).to(tl.float64)
        equal += tl.sum(at.to(tl.int64), 0)
        weight = tl.maximum(weight, tl.max(tl.where(at, w, 0.0), 0).to(tl.float64))
    return count, mass, equal, weight


@triton.jit
def _kept(row, start, vocab, temperature, floor, m, cut, ties, ties_before, BLOCK: tl.constexpr):
    """Weights of a block's kept tokens, zero for others, float64; how many are at the cut."""
    s, key = _load(row, start, vocab, temperature, floor, BLOCK)
    at = (key == cut).to(tl.int64)
    rank = ties_before + tl.cumsum(at, 0)
    keep = (key > cut) | ((at > 0) & (rank <= ties))
    return tl.where(keep, tl.exp(s - m), 0.0).to(tl.float64), tl.sum(at, 0)


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
    m = float("-inf")
    is_bad = 0
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        is_bad += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        m = tl.maximum(m, tl.max(tl.math.div_rn(x, temperature), 0))
    if (is_bad > 0) | (m == float("-inf")):
        tl.store(tokens, -1)
        return
    m = tl.where(m == 0.0, 0.0, m)
    floor = m + tl.load(log_min_ps + program)
    cut = tl.full((), -(1 << 31) + 1, tl.int64)  # below every valid key
    ties = tl.zeros((), dtype=tl.int64)
    mass = tl.zeros((), dtype=tl.float64)  # of what is kept
    top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)
    # All, then top-k, then top-p: a loop, so that its body is compiled once.
    for phase in range(3):
        is_on = (phase == 0) | ((phase == 1) & (top_k < vocab)) | ((phase == 2) & (top_p < 1.0))
        if is_on:
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
            mass = above + ties.to(tl.float64) * weight
    total = tl.zeros((), dtype=tl.float64)
    seen = tl.zeros((), dtype=tl.int64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        w, at_cut = _kept(row, start, vocab, temperature, floor, m, cut, ties, seen, BLOCK)
        total += tl.sum(w, 0)
        seen += at_cut
    target = tl.load(uniforms + program) * total
    before = tl.zeros((), dtype=tl.float64)
    seen = tl.zeros((), dtype=tl.int64)
    token = tl.full((), -1, tl.int64)
    start = 0
    while (token < 0) & (start < vocab):
        w, at_cut = _kept(row, start, vocab, temperature, floor, m, cut, ties, seen, BLOCK)
        after = before + tl.sum(w, 0)
        if after > target:
            reached = before + tl.cumsum(w, 0) > target
            at = start + tl.arange(0, BLOCK)
            token = tl.min(tl.where(reached & (w > 0.0), at, vocab), 0).to(tl.int64)
        before = after
        seen += at_cut
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
    """Change `tokens` [n] int64 in place, see above; other rows' stay."""
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
