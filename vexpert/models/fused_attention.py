"""Attention modules as: one product, one launch for norms, rope and cache, attention, o_proj."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vexpert.kernels.dense_factors import DenseDelta
from vexpert.kernels.norms import Norm
from vexpert.kernels.paged_decode import programs_of
from vexpert.kernels.replay import Replays
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_tiles import can_tile, rope_tiles
from vexpert.kernels.rope_write import rope_write
from vexpert.lora.layers import LoraLinear, LoraPackedLinear
from vexpert.models.attention import AttentionLayer, Softmax
from vexpert.models.fused_record import AttentionInputs, Call, Records, agree
from vexpert.ops.attention import AttentionBatch

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
NORM_NAMES = ("q_norm", "k_norm")
Angles = tuple[torch.Tensor, torch.Tensor]
ATTENTION = Replays("attention")
# x [..., in], and whether the reader can do tiles of tokens -> q, k, v [..., out], and what is
# still to add to them
Project = Callable[[torch.Tensor, bool], tuple[tuple[torch.Tensor, ...], DenseDelta | None]]


def prompt_lengths(batch: AttentionBatch) -> tuple[int, int]:
    """What the host chooses attention's kernels for prompts by, besides shapes."""
    # A single sequence has no decode rows beside its prompt's.
    return batch.block_size, batch.max_kv_len if batch.num_sequences > 1 else 0


class FusedAttention:
    """The forward of one attention module over the paged cache."""

    def __init__(self, module: Any, heads: Heads, rope: Rope, softmax: Softmax, pdl: bool) -> None:
        self.module = module
        self.heads = heads
        self.rope = rope
        self.softmax = softmax
        self.pdl = pdl
        self.project: Project = self._each
        self.packed: LoraPackedLinear | None = None  # what `project` is of
        self._tiles = can_tile(heads)
        self.output: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: o_proj itself
        norms = heads.q_norm, heads.k_norm
        sinks = softmax.sinks
        weights = [norm.weight for norm in norms if norm is not None]
        self.tensors = [tensor for tensor in (*weights, sinks) if tensor is not None]
        sizes = (heads.num_q, heads.num_kv, heads.width, rope, pdl)
        forms = [None if norm is None else (norm.eps, norm.form, norm.width) for norm in norms]
        self.facts = (*sizes, *forms, softmax.scaling, softmax.softcap, len(self.tensors))

    def arrays(self, batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
        """What attention of a step with prompts reads besides queries, the cache and weights."""
        first = batch.query_starts, batch.kv_lens, batch.block_tables
        if batch.num_sequences == 1:  # no decode rows beside its prompt's
            return first
        heads = self.heads
        return *first, batch.arrivals(programs_of(heads.num_kv, heads.num_q // heads.num_kv))

    def _each(self, x: torch.Tensor, _: bool) -> tuple[tuple[torch.Tensor, ...], DenseDelta | None]:
        module = self.module
        return (module.q_proj(x), module.k_proj(x), module.v_proj(x)), None

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Angles | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, H], (cos, sin) [1, T, R] each -> [1, T, H]."""
        output = self.output or self.module.o_proj
        return output(self._attend(hidden_states, position_embeddings)), None

    def deferred(
        self, hidden_states: torch.Tensor, position_embeddings: Angles | None = None, **_: object
    ) -> tuple[torch.Tensor, DenseDelta | None]:
        """The same, and what its reader has still to add to it; None: nothing."""
        done, o_proj = self._attend(hidden_states, position_embeddings), self.module.o_proj
        if isinstance(o_proj, LoraLinear):
            return o_proj.deferred(done)
        return (self.output or o_proj)(done), None

    def _attend(self, hidden: torch.Tensor, position_embeddings: Angles | None) -> torch.Tensor:
        """What o_proj reads, [1, T, Hq * d]; what prompts launch for it is replayed."""
        layer = self.module.vexpert_layer
        assert isinstance(layer, AttentionLayer)
        running = layer.context.running
        rows, cache = running.step.cache_rows, (layer.keys, layer.values)
        projected, rest = self.project(hidden, self._tiles)
        parts = tuple(part[0] for part in projected)
        angles = _flat(parts[0], position_embeddings)

        def run() -> tuple[torch.Tensor]:
            query = self._rotate(parts, angles, rows, cache, rest)
            return (layer.attend(query, self.softmax),)

        batch = running.attention_batch
        if batch.max_query_len == 1 or rest is not None:  # whose tensors are not among the inputs
            done = run()[0]
        else:
            lengths = prompt_lengths(batch)
            turned = () if angles[0] is parts[0] else angles
            inputs = [*parts, *turned, rows, *cache, *self.arrays(batch), *self.tensors]
            (found,) = ATTENTION(None, (self.facts, layer.kind, lengths), inputs, run)
            assert found is not None
            done = found
        return done.view(1, done.shape[0], -1)

    def rotate(
        self,
        hidden: torch.Tensor,
        angles: Angles | None,
        rows: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Queries [T, Hq, d]; keys and values go to `rows` [T] of the cache."""
        projected, rest = self.project(hidden, self._tiles)
        parts = tuple(part[0] for part in projected)
        return self._rotate(parts, _flat(parts[0], angles), rows, cache, rest)

    def _rotate(
        self,
        parts: tuple[torch.Tensor, ...],
        angles: Angles,
        rows: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rest: DenseDelta | None,
    ) -> torch.Tensor:
        q, k, v = parts
        how = self.heads, self.rope, angles, rows, cache
        if rest is not None and rest.tile is not None:
            return rope_tiles(q, k, v, *how, rest, self.pdl)
        return rope_write(q, k, v, *how, self.pdl, rest)


def _flat(q: torch.Tensor, angles: Angles | None) -> Angles:
    """cos and sin [T, R] of those [1, T, R]; `q` twice where nothing is rotated."""
    return (q, q) if angles is None else (angles[0][0].contiguous(), angles[1][0].contiguous())


def _ropes(angles: Angles | None, d: int) -> list[Rope]:
    """The ways in which models rotate heads of width d by tables as wide as `angles`."""
    if angles is None:
        return [Rope(0)]
    width = angles[0].shape[-1]
    ways = [Rope(width), Rope(2 * width), Rope(width, True), Rope(width, True, 2), Rope(0)]
    return [way for way in ways if way.width <= d and way.width % 2 == 0]


def recognise_attention(
    module: nn.Module,
    records: Records,
    norms: dict[nn.Module, Norm],
    pdl: bool,
    likely: Rope | None = None,
) -> FusedAttention | str:
    """`module` fused, or why it is not. `likely`: the rope that is tried first."""
    call, given = records.only(module), records.attention.get(module)
    reason = _unlike(module, call, given, records)
    if reason is not None:
        return reason
    assert call is not None
    assert given is not None
    found = [getattr(module, name, None) for name in NORM_NAMES]
    own = [norms.get(norm) if norm is not None else None for norm in found]
    if any((norm is None) != (known is None) for norm, known in zip(found, own, strict=True)):
        return "its norm of queries or keys is of an unknown form"
    heads = Heads(given.query.shape[1], given.key.shape[1], given.query.shape[3], own[0], own[1])
    options = given.options
    scaling = options.get("scaling")
    how = Softmax(
        heads.width**-0.5 if scaling is None else scaling,
        options.get("softcap"),
        options.get("s_aux"),
    )
    angles = call.kwargs.get("position_embeddings")
    for rope in sorted(_ropes(angles, heads.width), key=lambda way: way != likely):
        fused = FusedAttention(module, heads, rope, how, pdl)
        if _agrees(fused, call, given):
            return fused
    return "its queries or keys come out otherwise"


def _unlike(
    module: nn.Module, call: Call | None, given: AttentionInputs | None, records: Records
) -> str | None:
    """What in the module's structure is not that of q, k, v, attention, o; or None."""
    linears: list[Any] = [getattr(module, name, None) for name in (*PROJECTIONS, "o_proj")]
    if any(type(linear) is not nn.Linear for linear in linears):
        return "its projections are not q, k, v and o"
    if call is None or given is None:
        return "it is not called once"
    if given.key.shape != given.value.shape:
        return "its keys and values differ in shape"
    angles = call.kwargs.get("position_embeddings")
    is_pair = isinstance(angles, tuple) and len(angles) == 2
    if len(call.args) > 1 or not (angles is None or is_pair):
        return "it takes its rotation in another way"
    last = records.only(linears[3])
    flat = given.output.flatten(2)
    if last is None or not torch.equal(last.hidden.view_as(flat), flat):
        return "it changes what attention gives"
    if (
        not isinstance(call.output, tuple)
        or len(call.output) != 2
        or call.result is not last.output
    ):
        return "its result is not that of o_proj"
    return None


@torch.inference_mode()
def _agrees(fused: FusedAttention, call: Call, given: AttentionInputs) -> bool:
    """Whether queries, keys and values equal those that the module gave to attention."""
    want = [part[0].transpose(0, 1) for part in (given.query, given.key, given.value)]
    tokens, heads = want[0].shape[0], fused.heads
    found = heads.q_norm, heads.k_norm
    widths = tuple(norm.width for norm in found if norm is not None)
    d = heads.width
    if widths not in ((), (d, d), (heads.num_q * d, heads.num_kv * d)):
        return False
    rows = torch.arange(tokens, device=call.hidden.device)
    keys, values = (
        torch.zeros_like(part, memory_format=torch.contiguous_format) for part in want[1:]
    )
    angles = call.kwargs.get("position_embeddings")
    query = fused.rotate(call.hidden, angles, rows, (keys, values))
    return all(agree(got, part) for got, part in zip((query, keys, values), want, strict=True))
