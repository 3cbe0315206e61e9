"""One pair for each expert, or one tensor for all: every other layout of experts than PEFT's fused.

Per expert (transformers 4, Tinker's converter, prime-rl, ART, Megatron-Bridge):
  experts.N.gate_proj.lora_A [r, in], experts.N.gate_proj.lora_B [out, r]; also w1 / w3 / w2.
Stacked (Tinker, SGLang): experts.gate_proj.lora_A [E or 1, r, in], lora_B [E or 1, out, r]; a
  leading 1 is a factor that all experts share.
Mixed (Megatron-Bridge's shared outer): one side stacked with a leading 1, the other per expert.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from vexpert.errors import AdapterError
from vexpert.lora.checks import require_finite
from vexpert.lora.formats.context import (
    Context,
    check_bias,
    check_dora,
    dimensions,
    shapes,
    split_rows,
)
from vexpert.lora.formats.fused import finish_pair
from vexpert.lora.key_lists import spans
from vexpert.lora.keys import Piece, Slots
from vexpert.lora.types import ExpertsTarget, Factors, PerExpertFactors

_PARTS = ("A", "B", "magnitude")

Pieces = Mapping[int | None, Piece]  # by expert; None: of all experts


@dataclass(frozen=True)
class Side:
    """All experts' lora_A, or all experts' lora_B, of one projection.

    In the file's dtype, or float32 where experts differ.
    """

    tensor: torch.Tensor  # [E or 1, r, in] or [E or 1, out, r]; may be a view of the file
    ranks: dict[int, int] | None  # rank by expert where keys are per expert, else None
    rank: int  # of `tensor`: the largest

    def rank_of(self, expert: int | None) -> int:
        """The rank of one expert; None: of all together."""
        return self.rank if self.ranks is None or expert is None else self.ranks[expert]


def read_experts(
    target: ExpertsTarget, slots: Slots, context: Context
) -> tuple[dict[str, Factors], dict[str, torch.Tensor]]:
    """(factors, DoRA magnitudes) by projection, from (projection, part) -> expert -> piece."""
    factors: dict[str, Factors] = {}
    magnitudes: dict[str, torch.Tensor] = {}
    for projection in sorted({projection for projection, _ in slots}):
        parts = {part: by for (name, part), by in slots.items() if name == projection}
        _require_known(target, parts, context)
        found = read_projection(target, projection, parts, context)
        if found.keys() & factors.keys():
            raise AdapterError(f"{target.path}: {sorted(found)} stand in the file twice")
        factors.update(found)
        if "magnitude" in parts:
            magnitudes.update(
                read_magnitudes(target, projection, parts["magnitude"], parts.get("A", {}))
            )
    return factors, magnitudes


def _require_known(target: ExpertsTarget, parts: Mapping[str, Pieces], context: Context) -> None:
    odd = [next(iter(by.values())).key for part, by in parts.items() if part not in _PARTS]
    if odd:
        raise AdapterError(f"{odd[0]}: not supported for routed experts")
    check_dora(target.path, context.config.use_dora, "magnitude" in parts)
    check_bias(target.path, context.config)


def read_projection(
    target: ExpertsTarget, projection: str, parts: Mapping[str, Pieces], context: Context
) -> dict[str, Factors]:
    """Factors by projection from the pieces of gate, up, down or gate_up, by part and expert."""
    a_pieces, b_pieces = parts.get("A", {}), parts.get("B", {})
    plain = _read_plain(target, projection, a_pieces, b_pieces, context)
    if plain is not None:
        return {projection: plain}
    inputs, outputs = dimensions(target, projection)
    a = _side(target, a_pieces, inputs, False)
    b = _side(target, b_pieces, outputs, True)
    _check_ranks(a_pieces, b_pieces, a, b)
    context.note_format(_format_name(a, b))
    scale, b_tensor = _scaled(target, a_pieces, b_pieces, a, b, context)
    name = f"{target.path}.{projection}"
    return finish_pair(target, projection, name, a.tensor, b_tensor, scale, context)


def _read_plain(
    target: ExpertsTarget, projection: str, a: Pieces, b: Pieces, context: Context
) -> PerExpertFactors | None:
    """The usual case without a copy: every expert, one rank, one dtype, one scale; else None."""
    experts = range(target.num_experts)
    if projection == "gate_up" or not (set(a) == set(b) == set(experts)):
        return None
    a_parts, b_parts = (tuple(side[e].tensor for e in experts) for side in (a, b))
    inputs, outputs = dimensions(target, projection)
    rank = a_parts[0].shape[0]
    wanted = (((rank, inputs), a_parts), ((outputs, rank), b_parts))
    dtypes = {x.dtype for x in (*a_parts, *b_parts)}
    if len(dtypes) > 1 or any(x.shape != shape for shape, xs in wanted for x in xs):
        return None
    scale = context.scale(a[0].module, rank)
    same = all(context.scale(a[e].module, rank) == scale for e in experts)
    if not same or not context.is_in_range(scale, rank):
        return None
    name = f"{target.path}.{projection}"
    context.check_rank(name, rank)
    context.count_pair(name, a_parts, b_parts)
    context.note_format("per expert")
    return PerExpertFactors(a_parts, b_parts, scale)


def read_magnitudes(
    target: ExpertsTarget, projection: str, pieces: Pieces, adapted: Pieces
) -> dict[str, torch.Tensor]:
    """DoRA's magnitudes [E, out] by projection, NaN for experts without factors."""
    _, outputs = dimensions(target, projection)
    if set(pieces) != set(adapted) or None in pieces:
        raise AdapterError(
            f"{target.path}: {projection} has {len(adapted)} lora_A and {len(pieces)} "
            "lora_magnitude_vector; DoRA on experts needs one of each per expert"
        )
    found = torch.full((target.num_experts, outputs), torch.nan)
    for expert, piece in pieces.items():
        assert expert is not None
        if piece.tensor.shape != (outputs,):
            raise AdapterError(f"{shapes(piece)}: must be [{outputs}]")
        require_finite(piece.key, piece.tensor)
        found[expert] = piece.tensor
    if projection != "gate_up" or not target.has_gate:
        return {"up" if projection == "gate_up" else projection: found}
    gate, up = split_rows(target, found.unsqueeze(-1))
    return {"gate": gate.squeeze(-1).contiguous(), "up": up.squeeze(-1).contiguous()}


def _check_ranks(a_pieces: Pieces, b_pieces: Pieces, a: Side, b: Side) -> None:
    """AdapterError that names an expert whose lora_A and lora_B differ in rank."""
    experts: Iterable[int | None] = a.ranks or b.ranks or [None]
    odd = [expert for expert in experts if a.rank_of(expert) != b.rank_of(expert)]
    if not odd:
        return
    first, *others = sorted(odd, key=lambda expert: expert or 0)
    pieces = (side.get(first) or side[None] for side in (a_pieces, b_pieces))
    more = spans(expert for expert in others if expert is not None)
    whose = "expert" if len(others) == 1 else "experts"
    also = f", and those of {whose} {more} differ too" if others else ""
    raise AdapterError(
        f"{shapes(*pieces)}: lora_A has rank {a.rank_of(first)}, lora_B {b.rank_of(first)}{also}; "
        "the file is broken, save the adapter again"
    )


def _side(target: ExpertsTarget, pieces: Pieces, size: int, is_b: bool) -> Side:
    """`pieces` as one tensor. `size` is in_features for A, out_features for B."""
    if None in pieces:
        if len(pieces) > 1:
            raise AdapterError(
                f"{pieces[None].key}: the file also holds the same factor of single experts"
            )
        x = _stacked(target, pieces[None], size, is_b)
        return Side(x, None, x.shape[2 if is_b else 1])
    return _per_expert(target, {e: p for e, p in pieces.items() if e is not None}, size, is_b)


def _stacked(target: ExpertsTarget, piece: Piece, size: int, is_b: bool) -> torch.Tensor:
    x = piece.tensor
    if x.ndim == 3 and x.shape[0] in (1, target.num_experts) and x.shape[2 - is_b] == size:
        return x
    form = f"{size}, r" if is_b else f"r, {size}"
    raise AdapterError(
        f"{shapes(piece)}: {target.path} needs [{target.num_experts}, {form}] or, shared by all "
        f"experts, [1, {form}]; the adapter was made for another base model, or its format is "
        "unknown"
    )


def _per_expert(target: ExpertsTarget, pieces: dict[int, Piece], size: int, is_b: bool) -> Side:
    rank_dim = 1 if is_b else 0
    for piece in pieces.values():
        if piece.tensor.ndim != 2 or piece.tensor.shape[1 - rank_dim] != size:
            form = f"[{size}, r]" if is_b else f"[r, {size}]"
            raise AdapterError(
                f"{shapes(piece)}: {target.path} needs {form}; the adapter was made for another "
                "base model, or its file is broken"
            )
    ranks = {expert: piece.tensor.shape[rank_dim] for expert, piece in pieces.items()}
    tensors = {expert: piece.tensor for expert, piece in pieces.items()}
    if len({x.dtype for x in tensors.values()}) > 1:
        tensors = {expert: x.float() for expert, x in tensors.items()}
    rank = max(ranks.values())
    return Side(_stack(target.num_experts, tensors, rank, size, is_b), ranks, rank)


def _stack(
    experts: int, tensors: dict[int, torch.Tensor], rank: int, size: int, is_b: bool
) -> torch.Tensor:
    """[E, r, size], or [E, size, r] for B; experts without factors and missing ranks are zero."""
    if len(tensors) == experts and len({x.shape for x in tensors.values()}) == 1:
        return torch.stack([tensors[expert] for expert in range(experts)])
    shape = (experts, size, rank) if is_b else (experts, rank, size)
    out = torch.zeros(shape, dtype=next(iter(tensors.values())).dtype)
    for expert, x in tensors.items():
        out[expert, : x.shape[0], : x.shape[1]] = x
    return out


def _scaled(
    target: ExpertsTarget, a_pieces: Pieces, b_pieces: Pieces, a: Side, b: Side, context: Context
) -> tuple[float, torch.Tensor]:
    """The scale of all experts and B; where experts differ in scale, it is folded into B."""
    ranks = a.ranks or b.ranks
    pieces = a_pieces if a.ranks or not b.ranks else b_pieces
    if ranks is None:
        return context.scale(pieces[None].module, a.tensor.shape[1]), b.tensor
    scales = {expert: context.scale(pieces[expert].module, r) for expert, r in ranks.items()}
    first = next(iter(scales.values()))
    if all(scale == first for scale in scales.values()):
        return first, b.tensor
    name = next(iter(pieces.values())).module
    context.check_values(name, a.tensor, [b.tensor], max(scales.values(), key=abs))
    factor = torch.zeros(target.num_experts, 1, 1)
    for expert, scale in scales.items():
        factor[expert] = scale
    return 1.0, b.tensor.float() * factor


def _format_name(a: Side, b: Side) -> str:
    per_expert = [side.ranks is not None for side in (a, b)]
    if all(per_expert):
        return "per expert"
    return "shared outer, per expert" if any(per_expert) else "stacked experts"
