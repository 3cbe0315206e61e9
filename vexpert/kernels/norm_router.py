"""Residual add, norm, router product and top-k of few tokens in one launch.

  total, normed     as in rms_norm.py
  logits[t, e]      = sum over i of router[e, i] * normed[t, i] + bias[e]
  ids, weights      as in router_topk.py
Each token's experts are split over programs, which all compute the norm; the last of them to arrive
chooses. The router's weight is read before the launch in front of this one has ended.

| array | shape | holds |
|---|---|---|
| x, residual | [T, H] float | rows any stride apart |
| router | [E, H] float | contiguous |
| bias | [E] float, or None | |
| logits | [T, E] float32 | scratch; rounded to x's dtype if `rounds` |
| arrivals | [T] int32 | scratch; zeros before and after |
| total, normed | [T, H] in x's dtype | contiguous |
| ids | [T, K] int64 | |
| weights | [T, K] in the router's `dtype` | |
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
from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.dense_reader import add_of_row, factors_of_row, row_rest
from vexpert.kernels.launch import direct_launch
from vexpert.kernels.norms import MAX_WIDTH, Norm
from vexpert.kernels.rms_norm import add_residual, scale_rows
from vexpert.kernels.router_topk import Choice, Choosing, choice_options, choose_experts

MOST_TOKENS = 32  # each token reads the whole router anew
TILE = 16384  # elements of the router's weight in the registers of a program


@dataclass(frozen=True)
class Router:
    """A router's product and choice."""

    weight: torch.Tensor  # [E, H], of any float dtype
    bias: torch.Tensor | None  # [E] of any float dtype, of the product
    choice: Choice
    choice_bias: torch.Tensor | None  # [E] of any float dtype
    rounds: bool  # whether the logits are rounded to the dtype of the hidden states
    dtype: torch.dtype  # of the weights of the chosen experts


@dataclass(frozen=True)
class Scratch:
    """Arrays that launches use one after another."""

    logits: torch.Tensor  # [MOST_TOKENS * E] float32
    arrivals: torch.Tensor  # [MOST_TOKENS] int32

    @classmethod
    def empty(cls, num_experts: int, device: torch.device) -> "Scratch":
        logits = torch.empty(MOST_TOKENS * num_experts, dtype=torch.float32, device=device)
        return cls(logits, torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device))


@direct_launch
@triton.jit
def _norm_router_kernel(
    x,
    residual,
    norm_weight,
    router,
    bias,
    choice_bias,
    logits,
    arrivals,
    total,
    normed,
    ids,
    weights,
    stride_x,
    stride_residual,
    eps,
    multiplier,
    scale,
    sum_add,
    sum_min,
    h,
    slots,
    arena,
    table,
    num_slots,
    stride_h,
    plane,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
    LORA: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    RANK_STEPS: tl.constexpr,
    PLANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = normed.dtype.element_ty
    token = (tl.program_id(0) // SPLITS).to(tl.int64)
    split = tl.program_id(0) % SPLITS
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    mine = split * EXPERTS + tl.arange(0, EXPERTS)
    exists = mine < NUM_EXPERTS
    tile = tl.load(
        router + mine[:, None] * WIDTH + column[None, :],
        mask=exists[:, None] & inside[None, :],
        other=0.0,
    )
    w = column  # not read without a norm's weight
    if FORM != "plain":
        w = tl.load(norm_weight + column, mask=inside, other=0.0)
    pdl_release(PDL)
    if LORA:
        rank, b_at, b = factors_of_row(
            token, column, inside, slots, arena, table, num_slots, WIDTH, BLOCK_RANK, ALIGNMENT
        )
    pdl_wait(PDL)
    value = tl.load(x + token * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(residual + token * stride_residual + column, mask=inside, other=0.0)
    if LORA:
        value = add_of_row(
            value, token, rank, b_at, b, column, inside, h, plane, stride_h, arena, dtype, WIDTH,
            BLOCK_RANK, RANK_STEPS, PLANES, ALIGNMENT,
        )  # fmt: skip
    value = add_residual(value, other.to(tl.float32), multiplier, SCALE, dtype)
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    y = scale_rows(value * factor, w, FORM, dtype)
    if split == 0:
        tl.store(total + token * WIDTH + column, value.to(dtype), mask=inside)
        tl.store(normed + token * WIDTH + column, y, mask=inside)
    own = tl.sum(tile.to(tl.float32) * y.to(tl.float32)[None, :], 1)
    if PRODUCT_BIAS:
        own += tl.load(bias + mine, mask=exists, other=0.0).to(tl.float32)
    if ROUNDS:
        own = own.to(dtype).to(tl.float32)
    logits += token * NUM_EXPERTS
    tl.store(logits + mine, own, mask=exists)
    tl.debug_barrier()  # all of this program's logits come before its arrival
    arrived = tl.atomic_add(arrivals + token, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(arrivals + token, 0)
        expert = tl.arange(0, BLOCK_E)
        at = logits + expert
        # Not through the L1 cache: other programs wrote them.
        every = tl.load(at, mask=expert < NUM_EXPERTS, other=0.0, cache_modifier=".cg")
        choose_experts(
            every, choice_bias, ids + token * TOP_K, weights + token * TOP_K,
            Choosing(
                scale, sum_add, sum_min, NUM_EXPERTS, BLOCK_E, SCORE, HAS_BIAS, TOP_K, BLOCK_K,
                RENORMALISE, GROUPS, TOP_GROUPS, TWO, BLOCK_G,
            ),
        )  # fmt: skip


def norm_router(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm,
    multiplier: float,
    router: Router,
    scratch: Scratch,
    pdl: bool = False,
    rest: DenseDelta | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(total, normed, ids, weights), new, of x and residual, see the table above.

    `rest`: what is still to add to x. 1 to MOST_TOKENS tokens; H is the norm's width, at most
    MAX_WIDTH. The scratch may be another launch's once this one has ended. References:
    `kernels.norms.reference_rms_norm` and `kernels.router_topk.reference_router_topk`.
    """
    check_matrix("x", x)
    check_matrix("residual", residual)
    num_experts, width = router.weight.shape
    tokens, device, choice = x.shape[0], x.device, router.choice
    assert x.shape == residual.shape == (tokens, width), (x.shape, residual.shape, width)
    assert 0 < tokens <= MOST_TOKENS, tokens
    assert width == norm.width <= MAX_WIDTH, (width, norm.width)
    assert router.weight.is_contiguous(), router.weight.stride()
    assert scratch.logits.shape[0] >= tokens * num_experts, scratch.logits.shape
    total = torch.empty(tokens, width, dtype=x.dtype, device=device)
    normed = torch.empty_like(total)
    ids = torch.empty(tokens, choice.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, choice.top_k, dtype=router.dtype, device=device)
    given, options = row_rest(rest, x, width)
    block = power_of_two(width, 16, MAX_WIDTH)
    experts = power_of_two(num_experts, 1, max(1, TILE // block))
    splits = ceil_div(num_experts, experts)
    _norm_router_kernel[(tokens * splits,)](
        x, residual, x if norm.weight is None else norm.weight, router.weight,
        x if router.bias is None else router.bias,
        x if router.choice_bias is None else router.choice_bias, scratch.logits, scratch.arrivals,
        total, normed, ids, weights, x.stride(0), residual.stride(0), norm.eps, multiplier,
        choice.scale, choice.sum_add, choice.sum_min, *given,
        WIDTH=width, FORM=norm.form, SCALE=multiplier != 1.0, BLOCK=block, EXPERTS=experts,
        SPLITS=splits, PRODUCT_BIAS=router.bias is not None, ROUNDS=router.rounds,
        **choice_options(choice, num_experts, router.choice_bias is not None), **options,
        num_warps=8, **pdl_options(pdl),
    )  # fmt: skip
    return total, normed, ids, weights
