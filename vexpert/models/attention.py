"""Attention over the paged cache, as a function of transformers' AttentionInterface.

With the Triton backend it runs as kernels over the cache (`ops/attention.py`). On a CPU whole
contexts are gathered and go through PyTorch's own attention.

A layer keeps keys and values [num_blocks * block_size, Hkv, d]. Of multi-head latent attention it
keeps latents and the rotary part of the keys, in the same layout with one head, and attends in the
absorbed form: queries meet the latents themselves, which are the values too. The step's metadata
comes from the layer object that sits on the attention module, so several models live in one
process.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vexpert.lora.layers import LatentLinear
from vexpert.models.masks import MaskKind
from vexpert.models.plan import SMALL_QUERY, Group, StepPlan
from vexpert.ops import attention as ops

NAME = "vexpert"
SCORES_AT_ONCE = 1 << 26  # elements of float32 scores that the explicit softmax holds: 256 MiB


@dataclass
class StepContext:
    """What the layers of one model share: the plan of the running step."""

    plan: StepPlan | None = None

    @property
    def running(self) -> StepPlan:
        assert self.plan is not None, "attention outside a step"
        return self.plan


def _finite(values: torch.Tensor) -> torch.Tensor:
    """`values` with zeros for NaN and infinities."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Softmax:
    """How scores become weights: factor, optional cap of tanh, optional sink logit of each head."""

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq] in the model's dtype


class AttentionLayer:
    """Cache and mask kind of one attention module. `key_shape`, `value_shape`: (heads, width).

    latent: what expands the latents, in latent attention; keys are then latents, values the keys'
    rotary part, and both lie side by side in `both`.
    """

    def __init__(
        self,
        context: StepContext,
        kind: MaskKind,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
        latent: LatentLinear | None = None,
        use_kernels: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.context = context
        self.kind = kind
        self.key_shape = key_shape
        self.value_shape = value_shape
        self.latent = latent
        self.use_kernels = use_kernels
        self.batch_invariant = batch_invariant
        self.keys = torch.empty(0)
        self.values = torch.empty(0)
        self.both = torch.empty(0)

    @property
    def elements_per_token(self) -> int:
        """Cache elements that one token takes in this layer."""
        return sum(heads * width for heads, width in (self.key_shape, self.value_shape))

    def allocate(self, blocks: int, block_size: int, dtype: torch.dtype, device: Any) -> None:
        """Zeroed cache: padding is read under a mask, so it must be finite.

        Raises UnsupportedError where the kernels cannot run these heads.
        """
        if self.use_kernels:
            width = max(self.key_shape[1], self.value_shape[1])
            ops.check_attention(torch.device(device), dtype, width)
        rows = blocks * block_size
        if self.latent is not None:
            widths = [self.key_shape[1], self.value_shape[1]]
            self.both = torch.zeros(rows, 1, sum(widths), dtype=dtype, device=device)
            self.keys, self.values = torch.split(self.both, widths, 2)
            return
        self.keys = torch.zeros(rows, *self.key_shape, dtype=dtype, device=device)
        self.values = torch.zeros(rows, *self.value_shape, dtype=dtype, device=device)

    def write(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's key and value [1, Hkv, T, d] into the cache, in place."""
        rows = self.context.running.step.cache_rows
        if self.use_kernels:
            tokens = key[0].transpose(0, 1), value[0].transpose(0, 1)
            ops.write_cache(*tokens, rows, self.keys, self.values)
            return
        # What is not finite (an adapter with broken weights) must not stay in a block: its next
        # owner gives unwritten rows the weight zero, and zero times NaN is NaN.
        self.keys.index_copy_(0, rows, _finite(key[0].transpose(0, 1)))
        self.values.index_copy_(0, rows, _finite(value[0].transpose(0, 1)))

    def read(self, cache: torch.Tensor, blocks: torch.Tensor, sequences: int) -> torch.Tensor:
        """Whole blocks of `cache`: [sequences, length, Hkv, d]."""
        size = self.context.running.block_size
        found = cache.view(-1, size * cache.shape[1] * cache.shape[2]).index_select(0, blocks)
        return found.view(sequences, -1, cache.shape[1], cache.shape[2])

    def context_of(self, blocks: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of n sequences, [n, Hkv, length, d] each; latents: the same tensor."""
        if self.latent is not None:
            both = self.read(self.both, blocks, n).transpose(1, 2)
            return both, both
        keys = self.read(self.keys, blocks, n).transpose(1, 2)
        return keys, self.read(self.values, blocks, n).transpose(1, 2)

    def attend(self, query: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Attention of query [T, Hq, d] over what the cache holds: [T, Hq, d of value]."""
        run = ops.invariant_attention if self.batch_invariant else ops.paged_attention
        return run(
            query,
            self.keys,
            self.values,
            self.context.running.attention_batch,
            scaling=softmax.scaling,
            window=self.kind.window,
            chunk=self.kind.chunk,
            softcap=softmax.softcap,
            sinks=softmax.sinks,
        )

    def attend_latents(
        self, query: torch.Tensor, rotary: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Sums of latents [T, Hq, rank], for query [T, Hq, rank] and rotary [T, Hq, dr]."""
        return ops.latent_attention(
            query,
            rotary,
            self.keys,
            self.values,
            self.context.running.attention_batch,
            scaling=scaling,
            window=self.kind.window,
            chunk=self.kind.chunk,
        )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of all tokens of the step; writes their key and value to the cache in place.

    query [1, Hq, T, d], key and value [1, Hkv, T, d]; latent: what the cache keeps of both
    [1, 1, T, width]. Returns [1, T, Hq, d of value].
    """
    layer = module.vexpert_layer
    assert isinstance(layer, AttentionLayer)
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    layer.write(key, value)
    rows = query[0].transpose(0, 1)
    if layer.latent is not None:
        return _attend_latents(layer, layer.latent, rows, softmax)[None], None
    if layer.use_kernels:
        return layer.attend(rows, softmax)[None], None
    return _attend_groups(layer, rows, softmax)[None], None


def _attend_latents(
    layer: AttentionLayer, latent: LatentLinear, query: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """Latent attention of query [T, Hq, d of key], absorbed: [T, Hq, d of value]."""
    key, rotary = torch.split(query, [latent.columns.key, layer.value_shape[1]], 2)
    absorbed = latent.absorb(key)
    if layer.use_kernels:
        return latent.project(layer.attend_latents(absorbed, rotary, softmax.scaling))
    both = _attend_groups(layer, torch.cat((absorbed, rotary), 2), softmax)
    return latent.project(both[..., : layer.key_shape[1]])


def _attend_groups(layer: AttentionLayer, query: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Attention of query [T, Hq, d], group by group; [T, Hq, d of value]."""
    plan = layer.context.running
    repeat = query.shape[1] // layer.key_shape[0]
    # A chunk's rows of all heads, in one product with latents, would have a mask of that size.
    apart = [layer.latent is not None and group.q > SMALL_QUERY for group in plan.groups]
    masks = plan.head_masks(layer.kind, tuple(1 if each else repeat for each in apart))
    parts = zip(plan.groups, plan.keys(layer.kind), masks, apart, strict=True)
    out: torch.Tensor | None = None
    for group, keys, mask, each in parts:
        k, v = layer.context_of(keys.blocks, len(group.sequences))
        if each:
            k = v = k.expand(-1, repeat, -1, -1)
        done = _attend(query[group.rows], k, v, mask, group, softmax)
        if len(plan.groups) == 1:
            return done
        if out is None:
            out = done.new_empty(plan.num_tokens, *done.shape[1:])
        out[group.rows] = done
    assert out is not None, "a step has at least one token"
    return out


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    group: Group,
    softmax: Softmax,
) -> torch.Tensor:
    """One group: query [n * q, Hq, d], key and value [n, Hkv, S, d], mask [n, 1, G * q, S].

    The G query heads of one KV head are rows of one product, so keys are never repeated.
    """
    n, heads = key.shape[:2]
    q = query.view(n, group.q, heads, -1, query.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if softmax.softcap is None and softmax.sinks is None:
        out = functional.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, scale=softmax.scaling
        )
    else:
        out = _explicit(q, key, value, mask, softmax)
    split = out.reshape(n, heads, -1, group.q, out.shape[-1])  # [n, Hkv, G, q, d]
    return split.permute(0, 3, 1, 2, 4).reshape(n * group.q, query.shape[1], -1).contiguous()


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, how: Softmax
) -> torch.Tensor:
    """Softmax written out, for score caps and sinks; query rows in parts that bound the memory."""
    n, heads, rows, _ = query.shape
    sinks = None
    if how.sinks is not None:
        repeat = how.sinks.shape[0] // heads
        per_row = how.sinks.float().view(heads, repeat).repeat_interleave(rows // repeat, 1)
        sinks = per_row[None, :, :, None].expand(n, -1, -1, 1)
    step = max(1, SCORES_AT_ONCE // (n * heads * key.shape[2]))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        scores = torch.matmul(query[:, :, part], key.transpose(2, 3)).float() * how.scaling
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        scores = scores.masked_fill(~mask[:, :, part], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, :, part]), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        out[:, :, part] = torch.matmul(weights.to(value.dtype), value)
    return out
