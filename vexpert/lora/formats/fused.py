"""PEFT's ParamWrapper (`target_parameters`): one pair for all experts of a layer.

lora_A [E*r, x] holds expert-major rows, lora_B [y, r*E] rank-major columns (expert fastest), or
columns grouped by expert where lora_B_layout says so. For the base weight's (in, out), either
x = in and y = out ("A over the input", delta = B A), or x = out and y = in (delta = (B A)^T).

Keys: `experts.base_layer.lora_A` is the inner wrapper, of the parameter declared first (gate_up);
`experts.lora_A` the outer one. A single wrapper is always outer, whatever it wraps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from vexpert.errors import AdapterError
from vexpert.lora import versions
from vexpert.lora.formats.context import Context, check_wrapped, dimensions, shapes, split_rows
from vexpert.lora.keys import PREFIX, Piece, Slots
from vexpert.lora.types import ExpertsFactors, ExpertsTarget, Factors

# Classes whose weights are [E, in, out] but that lack the attribute `is_transposed`.
NO_TRANSPOSED_FLAG = frozenset({"Llama4TextExperts"})


@dataclass(frozen=True)
class FusedPair:
    """One wrapper's factors, in the file's dtype, with the parameter they belong to."""

    target: ExpertsTarget
    projection: str  # gate_up or down
    name: str  # of the parameter in the file's naming: what patterns match
    a: torch.Tensor  # [E*r, x]
    b: torch.Tensor  # [y, r*E]
    layout: str | None = None  # order of b's columns where its own shape tells it
    keys: str = ""  # both keys and shapes, for messages

    def sides(self) -> tuple[bool, ...]:
        """Which orientations the shapes allow; True: A over the input."""
        inputs, outputs = dimensions(self.target, self.projection)
        have = self.a.shape[1], self.b.shape[0]
        allowed = {True: (inputs, outputs), False: (outputs, inputs)}
        return tuple(side for side, wanted in allowed.items() if have == wanted)


def parameter_name(target: ExpertsTarget, projection: str) -> str:
    """The base parameter: gate_up_proj (up_proj without a gate) or down_proj."""
    if projection == "down":
        return "down_proj"
    return "gate_up_proj" if target.has_gate else "up_proj"


def take_pairs(target: ExpertsTarget, slots: Slots, context: Context) -> list[FusedPair]:
    """The fused pairs of one experts module; none when its tensors are in another format."""
    names = {projection for projection, _ in slots}
    nested = names & {"inner", "outer"}
    if not nested and not all(_is_flat(slots, name) for name in names):
        return []
    if nested and names != nested:
        raise AdapterError(
            f"{target.path}: keys of PEFT's parameter wrappers stand beside keys of another "
            f"format ({', '.join(sorted(names - nested))}); save the adapter in one format"
        )
    pairs = {name: _pair(target, name, slots) for name in sorted(names)}
    check_wrapped(target.path, context.config)
    if not nested:
        return list(pairs.values())
    return _assign(pairs.get("inner"), pairs.get("outer"), context)


def _is_flat(slots: Slots, name: str) -> bool:
    """Whether a projection is one 2D pair for all experts: transformers 4's parallel experts."""
    pieces = [by.get(None) for (projection, _), by in slots.items() if projection == name]
    flat = all(piece is not None and piece.tensor.ndim == 2 for piece in pieces)
    return flat and name in ("gate_up", "down")


def _pair(target: ExpertsTarget, name: str, slots: Slots) -> FusedPair:
    parts = {part: by for (projection, part), by in slots.items() if projection == name}
    a, b = parts.pop("A", {}).get(None), parts.pop("B", {}).get(None)
    if parts:
        keys = [piece.key for by in parts.values() for piece in by.values()]
        raise AdapterError(
            f"{', '.join(keys)}: not supported for routed experts, whose parameters have one "
            "lora_A and one lora_B each; the format is unknown"
        )
    assert a is not None, "check_halves"
    assert b is not None, "check_halves"
    module = a.module.removesuffix(".base_layer")
    if name not in ("inner", "outer") and not module.endswith(("_proj", "_projs")):
        module = f"{module}.weight"  # granitemoe's input_linear on transformers 4
    matrix_a, matrix_b, layout = _matrices(target, a, b)
    return FusedPair(target, name, module, matrix_a, matrix_b, layout, shapes(a, b))


def _matrices(
    target: ExpertsTarget, a: Piece, b: Piece
) -> tuple[torch.Tensor, torch.Tensor, str | None]:
    """Both as matrices. Some exporters leave the expert dimension: A [E, r, x], B [y, r, E]."""
    x, y = a.tensor, b.tensor
    if x.ndim == 2 and y.ndim == 2:
        return x, y, None
    experts = target.num_experts
    if x.ndim == 3 and y.ndim == 3 and x.shape[0] == experts:
        rank = x.shape[1]
        last, first = y.shape[1:] == (rank, experts), y.shape[::2] == (experts, rank)
        if last != first:
            y = y if last else y.permute(1, 2, 0)
            return x.flatten(0, 1), y.flatten(1), "rank_major"
    raise AdapterError(
        f"{shapes(a, b)}: {target.path} with {experts} experts needs matrices, or [E, r, x] with "
        "[y, r, E] or [E, y, r]; the format is unknown"
    )


def _assign(inner: FusedPair | None, outer: FusedPair | None, context: Context) -> list[FusedPair]:
    """The wrappers of one experts module with the parameters they wrap."""
    if outer is None:
        assert inner is not None
        key = f"{PREFIX}{inner.name}"
        raise AdapterError(
            f"{key}.base_layer.lora_{{A,B}}.weight, of {parameter_name(inner.target, 'gate_up')}, "
            f"are in the file, but not {key}.lora_{{A,B}}.weight, of down_proj, which PEFT saves "
            "beside them: the file is incomplete; save the adapter again"
        )
    if inner is None:
        return [_single(outer, context)]
    given = [_wrapping(inner, "gate_up"), _wrapping(outer, "down")]
    swapped = [_wrapping(inner, "down"), _wrapping(outer, "gate_up")]
    # Declaration order first; another order only where the shapes leave nothing else.
    for pairs in (given, swapped):
        if all(pair.sides() for pair in pairs):
            return pairs
    raise _shape_error(*given)


def _wrapping(pair: FusedPair, projection: str) -> FusedPair:
    name = f"{pair.name}.{parameter_name(pair.target, projection)}"
    return replace(pair, projection=projection, name=name)


def _single(outer: FusedPair, context: Context) -> FusedPair:
    choices = [_wrapping(outer, projection) for projection in ("gate_up", "down")]
    fitting = [pair for pair in choices if pair.sides()]
    if not fitting:
        raise _shape_error(outer)
    if len(fitting) == 1:
        return fitting[0]
    named = [pair for pair in fitting if _is_named(pair, context.config.target_parameters)]
    if len(named) != 1:
        raise AdapterError(
            f"{outer.keys}: the shapes fit both {choices[0].name} and {choices[1].name}, and "
            f"target_parameters={list(context.config.target_parameters)} does not say which; name "
            "the right one there"
        )
    return named[0]


def _is_named(pair: FusedPair, target_parameters: Iterable[str]) -> bool:
    return any(pair.name == name or pair.name.endswith(f".{name}") for name in target_parameters)


def _shape_error(*pairs: FusedPair) -> AdapterError:
    target = pairs[0].target
    wanted = "; ".join(
        f"{parameter_name(target, projection)} has in {inputs}, out {outputs}"
        for projection in ("gate_up", "down")
        for inputs, outputs in [dimensions(target, projection)]
    )
    return AdapterError(
        f"{', '.join(pair.keys for pair in pairs)}: no reading fits {target.path} with "
        f"{target.num_experts} experts ({wanted}; lora_A [E*r, in], lora_B [out, r*E] or the "
        "transposed pair); the adapter was made for another base model"
    )


def read_fused(pairs: list[FusedPair], context: Context) -> dict[str, ExpertsFactors]:
    """Factors of all fused pairs of a file by target path; square weights follow the others."""
    sides = {side for pair in pairs if len(pair.sides()) == 1 for side in pair.sides()}
    results: dict[str, dict[str, Factors]] = {}
    for pair in pairs:
        found = _read_pair(pair, _side(pair, sides, context), context)
        results.setdefault(pair.target.path, {}).update(found)
    return {path: ExpertsFactors(**found) for path, found in results.items()}


def _side(pair: FusedPair, decided: set[bool], context: Context) -> bool:
    """True: A lies over the input. By shape, else by the file's other pairs, else by version."""
    allowed = pair.sides()
    if not allowed:
        raise _shape_error(pair)
    if len(allowed) == 1:
        return allowed[0]
    if len(decided) == 1:
        return next(iter(decided))
    eras = versions.possible_eras(context.config.version, context.config.fields)
    by_era = {_side_of_era(pair.target, era) for era in eras}
    if len(decided) > 1 or len(by_era) > 1:
        raise AdapterError(
            f"{pair.keys}: {pair.name} is square, so the shapes do not tell whether "
            "lora_A lies over its input or its output, and adapter_config.json names no "
            'peft_version; add the trainer\'s, such as "peft_version": "0.21.2"'
        )
    if pair.target.is_transposed and pair.target.class_name not in NO_TRANSPOSED_FLAG:
        _warn_square(pair, context)
    return by_era.pop()


def _side_of_era(target: ExpertsTarget, era: str) -> bool:
    """PEFT's rule on transformers 5. d1, d2: the last dimensions of the base weight [E, d1, d2]."""
    has_flag = target.is_transposed and target.class_name not in NO_TRANSPOSED_FLAG
    over_d1 = {
        versions.ERA_FIRST: True,
        versions.ERA_0190: not has_flag,
        versions.ERA_NOW: has_flag,
    }[era]
    return over_d1 == target.is_transposed  # d1 is the input where the weights are transposed


def _warn_square(pair: FusedPair, context: Context) -> None:
    text = (
        f"{pair.target.class_name}: square weights read as PEFT "
        f"{context.config.version or 'up to 0.17'} writes them on transformers 5; the same file "
        "from transformers 4 can mean the transpose"
    )
    if text not in context.warnings:
        context.warnings.append(text)


def _read_pair(pair: FusedPair, over_input: bool, context: Context) -> dict[str, Factors]:
    experts = pair.target.num_experts
    rows, columns = pair.a.shape[0], pair.b.shape[1]
    if rows != columns or rows % experts:
        raise AdapterError(
            f"{pair.keys}: lora_A's rows and lora_B's columns must both be rank x {experts} "
            "experts; the adapter was made for another base model"
        )
    rank = rows // experts
    a = pair.a.view(experts, rank, -1)
    _check_experts(pair, rank, context)
    context.is_layout_used |= pair.layout is None
    b = _columns(pair.b, experts, rank, pair.layout or context.layout)
    if not over_input:
        a, b = _own(b).mT, a.mT
    context.note_format("fused experts")
    scale = context.scale(pair.name, rank)
    return finish_pair(pair.target, pair.projection, pair.name, a, b, scale, context)


def _check_experts(pair: FusedPair, rank: int, context: Context) -> None:
    """A rank that PEFT's own config rules out, but that another number of experts explains."""
    if not context.config.names_version:
        return
    experts, rows = pair.target.num_experts, pair.a.shape[0]
    stated = [r for r in context.config.patterns.ranks(pair.name) if r is not None]
    if rank not in stated:
        for r in stated:
            if rows % r == 0:
                raise AdapterError(
                    f"{pair.keys}: adapter_config.json says rank {r}, which fits {rows // r} "
                    f"experts; {pair.target.path} has {experts}: the adapter was made for another "
                    f"base model (if not, state the rank, {rank}, in adapter_config.json)"
                )


def _columns(b: torch.Tensor, experts: int, rank: int, layout: str | None) -> torch.Tensor:
    """lora_B [y, r*E] as [E, y, r], a view."""
    if layout == "grouped_by_expert":
        return b.view(-1, experts, rank).permute(1, 0, 2)
    return b.view(-1, rank, experts).permute(2, 0, 1)


def finish_pair(
    target: ExpertsTarget,
    projection: str,
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    context: Context,
) -> dict[str, Factors]:
    """Canonical factors by projection from a [E or 1, r, in] and b [E or 1, out, r].

    A fused gate_up gives gate and up with one A tensor; b's rows follow the base weight's order.
    `name` is for messages.
    """
    a = _own(a)
    if projection != "gate_up" or not target.has_gate:
        key = "up" if projection == "gate_up" else projection
        return {key: context.factors(name, a, _own(b), scale)}
    gate, up = (_own(half) for half in split_rows(target, b))
    context.check(name, a, [gate, up], scale)
    return {"gate": Factors(a, gate, scale), "up": Factors(a, up, scale)}


def _own(x: torch.Tensor) -> torch.Tensor:
    """x [E, y, r] contiguous in a storage of its own: a copy of what views the file, else x."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    columns = x.permute(1, 2, 0)
    if columns.is_contiguous() and x.shape[0] > 1:
        # Rank-major columns: one transpose of [y*r, E], 2 to 4 times as fast as a permuted copy.
        return columns.reshape(-1, x.shape[0]).t().contiguous().view(x.shape)
    return x.clone(memory_format=torch.contiguous_format)
