"""A router's choice: scores, top-k, renormalised and scaled weights, in one launch.

  score[e]  = by `score`: softmax(logits)[e], sigmoid(logits[e]), or logits[e] itself ("chosen")
  choice[e] = score[e] + bias[e], lowest outside the `top_groups` best groups of experts
  ids       = the K experts of the highest choice, highest first; of equal ones the lowest id first
  w         = score[ids]; for "chosen", softmax over the K of them
  weights   = scale * w / max(sum of w + sum_add, sum_min) if renormalised, else scale * w

A group's rank is the sum of its two highest choices, or its highest alone (`group_two`). A NaN
counts as the lowest choice, so ids are valid whatever the logits are; all in float32.

| array | shape | holds |
|---|---|---|
| logits | [T, E] of any float dtype | rows any stride apart |
| bias | [E] of any float dtype, or None | |
| ids | [T, K] int64 | |
| weights | [T, K] in the `dtype` asked for | |
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import check_matrix, pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch

SCORES = ("softmax", "sigmoid", "chosen")
MAX_EXPERTS = 4096
LOWEST = tl.constexpr(-1.0e38)  # of a NaN; what is taken already, or does not exist, has -inf


@dataclass(frozen=True)
class Choice:
    """How a router chooses, see above."""

    score: str
    top_k: int
    renormalise: bool = False
    scale: float = 1.0
    sum_add: float = 0.0
    sum_min: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_two: bool = True


class Choosing(NamedTuple):
    """A `Choice` as kernels take it: arguments, and in capitals constants, see `choice_options`.

    To be built where it is passed: an assignment would make tensors of its constants.
    """

    scale: Any
    sum_add: Any
    sum_min: Any
    NUM_EXPERTS: Any
    BLOCK_E: Any
    SCORE: Any
    HAS_BIAS: Any
    TOP_K: Any
    BLOCK_K: Any
    RENORMALISE: Any
    GROUPS: Any
    TOP_GROUPS: Any
    TWO: Any
    BLOCK_G: Any


@triton.jit
def _best(choice, expert):
    """The highest choice and the lowest expert that has it."""
    value = tl.max(choice, 0)
    return value, tl.min(tl.where(choice == value, expert, 1 << 30), 0)


@triton.jit
def _keep_groups(
    choice,
    expert,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """choice, with the lowest outside the best groups."""
    SIZE: tl.constexpr = NUM_EXPERTS // GROUPS
    group = tl.arange(0, BLOCK_G)
    rank = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for g in range(GROUPS):
        own = tl.where(expert // SIZE == g, choice, float("-inf"))
        value, first = _best(own, expert)
        if TWO and SIZE > 1:
            value += tl.max(tl.where(expert == first, float("-inf"), own), 0)
        rank = tl.where(group == g, value, rank)
    kept = expert < 0
    for _ in range(TOP_GROUPS):
        value, best = _best(rank, group)
        kept = kept | (expert // SIZE == best)
        rank = tl.where(group == best, float("-inf"), rank)
    return tl.where(kept, choice, tl.minimum(choice, LOWEST))


@triton.jit
def choose_experts(logits, bias, ids, weights, by):
    """One token: logits [BLOCK_E] float32 -> the K places that ids and weights point at."""
    expert = tl.arange(0, by.BLOCK_E)
    exists = expert < by.NUM_EXPERTS
    score = logits
    if by.SCORE == "softmax":
        high = tl.max(tl.where(exists, logits, float("-inf")), 0)
        power = tl.where(exists, tl.exp(logits - high), 0.0)
        score = power / tl.sum(power, 0)
    elif by.SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    choice = score
    if by.HAS_BIAS:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    elif by.SCORE == "softmax" and by.GROUPS == 1:
        choice = logits  # the same order, and finer
    choice = tl.where(choice == choice, tl.maximum(choice, LOWEST), LOWEST)
    choice = tl.where(exists, choice, float("-inf"))
    if by.TOP_GROUPS < by.GROUPS:
        choice = _keep_groups(
            choice, expert, by.NUM_EXPERTS, by.GROUPS, by.TOP_GROUPS, by.TWO, by.BLOCK_G
        )
        choice = tl.where(exists, choice, float("-inf"))
    place = tl.arange(0, by.BLOCK_K)
    chosen = tl.zeros((by.BLOCK_K,), dtype=tl.int32)
    w = tl.full((by.BLOCK_K,), float("-inf"), tl.float32)
    for k in range(by.TOP_K):
        _, best = _best(choice, expert)
        own = tl.sum(tl.where(expert == best, score, 0.0), 0)
        chosen = tl.where(place == k, best, chosen)
        w = tl.where(place == k, own, w)
        choice = tl.where(expert == best, float("-inf"), choice)
    taken = place < by.TOP_K
    if by.SCORE == "chosen":
        w = tl.exp(w - tl.max(w, 0))
        w /= tl.sum(tl.where(taken, w, 0.0), 0)
    if by.RENORMALISE:
        total = tl.sum(tl.where(taken, w, 0.0), 0)
        w /= tl.maximum(total + by.sum_add, by.sum_min, propagate_nan=tl.PropagateNan.ALL)
    tl.store(ids + place, chosen.to(tl.int64), mask=taken)
    tl.store(weights + place, (w * by.scale).to(weights.dtype.element_ty), mask=taken)


@direct_launch
@triton.jit
def _router_topk_kernel(
    logits,
    bias,
    ids,
    weights,
    stride_logits,
    scale,
    sum_add,
    sum_min,
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
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    at = logits + token * stride_logits + expert
    own = tl.load(at, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    choose_experts(
        own, bias, ids + token * TOP_K, weights + token * TOP_K,
        Choosing(
            scale, sum_add, sum_min, NUM_EXPERTS, BLOCK_E, SCORE, HAS_BIAS, TOP_K, BLOCK_K,
            RENORMALISE, GROUPS, TOP_GROUPS, TWO, BLOCK_G,
        ),
    )  # fmt: skip


def choice_options(choice: Choice, num_experts: int, has_bias: bool) -> dict[str, object]:
    """The constants of `choose_experts`."""
    assert choice.score in SCORES, choice
    assert 0 < choice.top_k <= num_experts <= MAX_EXPERTS, (choice, num_experts)
    assert num_experts % choice.groups == 0, (choice, num_experts)
    return {
        "NUM_EXPERTS": num_experts,
        "BLOCK_E": power_of_two(num_experts, 16, MAX_EXPERTS),
        "SCORE": choice.score,
        "HAS_BIAS": has_bias,
        "TOP_K": choice.top_k,
        "BLOCK_K": power_of_two(choice.top_k, 1, 512),
        "RENORMALISE": choice.renormalise,
        "GROUPS": choice.groups,
        "TOP_GROUPS": choice.top_groups,
        "TWO": choice.group_two,
        "BLOCK_G": power_of_two(choice.groups, 1, 512),
    }


def router_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    choice: Choice,
    dtype: torch.dtype,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights), new, of logits; E is at most MAX_EXPERTS. No launch if T is 0.

    Reference: `reference_router_topk`.
    """
    check_matrix("logits", logits)
    tokens, num_experts = logits.shape
    shape, device = (tokens, choice.top_k), logits.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    weights = torch.empty(shape, dtype=dtype, device=device)
    if tokens == 0:
        return ids, weights
    _router_topk_kernel[(tokens,)](
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        logits.stride(0),
        choice.scale,
        choice.sum_add,
        choice.sum_min,
        **choice_options(choice, num_experts, bias is not None),
        num_warps=power_of_two(num_experts // 256, 1, 4),
        **pdl_options(pdl),
    )
    return ids, weights


def reference_router_topk(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch, float32, to be read; NaN apart."""
    logits = logits.float()
    score = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(choice.score, logits)
    ranked = score if bias is None else score + bias.float()
    if choice.top_groups < choice.groups:
        grouped = ranked.unflatten(-1, (choice.groups, -1))
        two = min(2 if choice.group_two else 1, grouped.shape[-1])
        best = grouped.topk(two).values.sum(-1).sort(descending=True, stable=True).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool)
        kept.scatter_(1, best[:, : choice.top_groups], True)
        ranked = grouped.masked_fill(~kept[..., None], -3e38).flatten(1)
    ids = ranked.sort(descending=True, stable=True).indices[:, : choice.top_k]
    w = score.gather(1, ids)
    if choice.score == "chosen":
        w = w.softmax(-1)
    if choice.renormalise:
        w = w / (w.sum(-1, keepdim=True) + choice.sum_add).clamp(min=choice.sum_min)
    return ids, w * choice.scale
