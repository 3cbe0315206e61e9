"""Attention over a paged cache, and writing that cache: checks, and the choice of a kernel.

The kernels are Triton's. `ops/attention_reference.py` says the same slowly, on any device.
"""

from functools import cache

import torch

from vexpert.errors import UnsupportedError
from vexpert.kernels.paged_types import AttentionBatch, Scores
from vexpert.log import get_logger, log_once
from vexpert.ops.attention_reference import reference_attention, reference_latent_attention
from vexpert.ops.backend import unsupported_because

__all__ = [
    "AttentionBatch",
    "invariant_attention",
    "latent_attention",
    "paged_attention",
    "reference_attention",
    "reference_latent_attention",
    "write_cache",
]

WIDEST_HEAD = 512

logger = get_logger(__name__)


@cache
def check_attention(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Raise UnsupportedError unless heads of `width` in `dtype` can be attended on `device`."""
    reason = unsupported_because("triton", device, dtype)
    if reason is None and width > WIDEST_HEAD:
        reason = f"its heads have at most {WIDEST_HEAD} columns"
    if reason is not None:
        raise UnsupportedError(
            f"paged attention in Triton cannot run heads of {width} columns in {dtype} on "
            f"{device}: {reason}; use another device or dtype"
        )
    log_once(logger, f"attention: triton paged for {dtype} on {device}")


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of query [T, Hq, d] over keys [rows, Hkv, d], values [rows, Hkv, dv].

    Query i sees keys j with j > i - window, and j // chunk == i // chunk, of those at or before it.
    softcap: scores s become softcap * tanh(s / softcap). sinks [Hq]: a score more in each head's
    softmax, without a value. Returns [T, Hq, dv] in `out`, or new; rows from query_starts[-1] on
    are left as they are, but for a decode step's (max_query_len 1), which become zero.
    No value is asked of the device: a captured graph may be replayed with other lengths and
    tables, up to max_query_len and max_kv_len.
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], values.shape[2])
    how = Scores(scaling, window, chunk, softcap, sinks)
    _attend(query, None, keys, values, batch, how, out)
    return out


def latent_attention(
    query: torch.Tensor,
    rotary: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same of latent attention in its absorbed form, where keys have two parts.

    query [T, Hq, d] meets keys [rows, Hkv, d], the latents, and rotary [T, Hq, dr] meets values
    [rows, Hkv, dr]. The latents are what is summed up: returns [T, Hq, d].
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend(query, rotary, keys, values, batch, Scores(scaling, window, chunk), out)
    return out


def _attend(
    query: torch.Tensor,
    rotary: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    how: Scores,
    out: torch.Tensor,
) -> None:
    """Fill `out` by the kernels that the step asks for."""
    from vexpert.kernels.paged_decode import paged_decode  # needs Triton
    from vexpert.kernels.paged_prefill import paged_prefill
    from vexpert.ops.attention_plan import choose_attention

    width = max(query.shape[2], values.shape[2])
    _check(query, keys, values, width)
    latent_heads = 0 if rotary is None else query.shape[1] // keys.shape[1]
    plan = choose_attention(width, query.dtype, query.device, latent_heads)
    decode = plan.decode_of(batch.num_sequences * keys.shape[1])
    if batch.max_query_len == 1:
        paged_decode(query, keys, values, batch, how, out, decode, rotary)
        return
    both = batch.num_sequences > 1 and how.most_keys(batch.max_kv_len) >= plan.split_mixed_from
    if both:
        paged_decode(query, keys, values, batch, how, out, decode, rotary)
    least_len = 2 if both else 1
    paged_prefill(query, keys, values, batch, how, out, plan.prefill, least_len, rotary)


def invariant_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by one kernel for every query, its keys in steps from the first one on.

    So a row of the result depends neither on the other sequences nor on the chunk it comes in.
    """
    from vexpert.kernels.paged_prefill import paged_prefill  # needs Triton
    from vexpert.ops.attention_plan import choose_attention

    width = max(query.shape[2], values.shape[2])
    _check(query, keys, values, width)
    # Zeros: a graph's padding is computed with, so it must be a number.
    out = query.new_zeros(*query.shape[:2], values.shape[2])
    plan = choose_attention(width, query.dtype, query.device)
    how = Scores(scaling, window, chunk, softcap, sinks)
    paged_prefill(query, keys, values, batch, how, out, plan.prefill)
    return out


def _check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, width: int) -> None:
    if query.dtype is keys.dtype is values.dtype and query.device == keys.device == values.device:
        check_attention(query.device, query.dtype, width)
        return
    raise UnsupportedError(
        f"paged attention: query {query.dtype} on {query.device}, keys {keys.dtype} on "
        f"{keys.device} and values {values.dtype} on {values.device} differ; use one for all"
    )


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write key [T, Hkv, d] and value [T, Hkv, dv] to rows of the cache, in place.

    What is not finite becomes zero; tokens with a negative row are not written.
    """
    from vexpert.kernels.cache_write import write_cache as launch  # needs Triton
    from vexpert.kernels.common import can_use_pdl

    _check(key, keys, values, 1)
    launch(key, value, cache_rows, keys, values, can_use_pdl(key.device))
