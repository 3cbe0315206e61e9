"""What the kernels of rope_write.py and of rope_tiles.py are given alike; the arrays are there."""

from dataclasses import dataclass
from typing import Any

import torch

from vexpert.kernels.common import check_matrix, power_of_two
from vexpert.kernels.norms import Norm


@dataclass(frozen=True)
class Rope:
    """How a model rotates heads: which pairs, by which columns of cos and sin."""

    width: int  # R; 0: heads are not rotated
    interleaved: bool = False
    step: int = 1  # columns of cos from one pair to the next


@dataclass(frozen=True)
class Heads:
    """Sizes and norms of an attention's heads. A norm is as wide as a head, or as all of them."""

    num_q: int
    num_kv: int
    width: int  # d
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    # Whether as many heads share a program when tokens are few: the order of a norm's sum follows.
    batch_invariant: bool = False


def head_arguments(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache_rows: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """An empty q_out [T, Hq, d], and what the kernels begin with, q ... k_eps: rope_tiles' too."""
    (q, k, v), (cos, sin), tokens, d = qkv, angles, len(qkv[0]), heads.width
    for name, x, count in (("q", q, heads.num_q), ("k", k, heads.num_kv), ("v", v, heads.num_kv)):
        check_matrix(name, x)
        assert x.shape == (tokens, count * d), (name, tuple(x.shape), tokens, heads)
    for stored in cache:
        assert stored.is_contiguous(), stored.stride()
        assert stored.shape[1:] == (heads.num_kv, d), (tuple(stored.shape), heads)
    assert cos.stride() == sin.stride(), (cos.stride(), sin.stride())
    check_matrix("cos", cos)
    q_out = torch.empty(tokens, heads.num_q, d, dtype=q.dtype, device=q.device)
    strides = q.stride(0), k.stride(0), v.stride(0), cos.stride(0)
    eps = (0.0 if norm is None else norm.eps for norm in (heads.q_norm, heads.k_norm))
    weights = _norm_weights(heads, q)
    return q_out, (q, k, v, *weights, cos, sin, cache_rows, q_out, *cache, *strides, *eps)


def head_options(heads: Heads, rope: Rope, least: int) -> dict[str, Any]:
    """The constants of heads; blocks of `least` columns, or more."""
    d, q_norm, k_norm = heads.width, heads.q_norm, heads.k_norm
    return {
        "NUM_Q": heads.num_q,
        "NUM_KV": heads.num_kv,
        "D": d,
        "BLOCK_D": power_of_two(d, 16, 1024),
        "ROTARY": rope.width,
        "BLOCK_R": power_of_two(rope.width // 2, least, 512),
        "BLOCK_P": power_of_two(d - rope.width, least, 1024),
        "INTERLEAVED": rope.interleaved,
        "STEP": rope.step,
        "Q_FORM": "plain" if q_norm is None else q_norm.form,
        "K_FORM": "plain" if k_norm is None else k_norm.form,
    }


def _norm_weights(heads: Heads, none: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of both norms, or `none`."""
    q_norm, k_norm = heads.q_norm, heads.k_norm
    assert (q_norm is None) == (k_norm is None), heads
    q_weight = none if q_norm is None or q_norm.weight is None else q_norm.weight
    return q_weight, none if k_norm is None or k_norm.weight is None else k_norm.weight
