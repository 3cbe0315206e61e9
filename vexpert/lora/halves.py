"""Refuses files with one factor of a pair, before any pair is read: all keys at once."""

import re
from collections.abc import Collection, Iterable, Mapping

import torch

from vexpert.errors import AdapterError
from vexpert.lora.key_lists import counted, key_lines, partner
from vexpert.lora.keys import Piece, Slots, parse_key
from vexpert.lora.placing import Placed

_EXPERT = re.compile(r"\.experts\.(?:0|[1-9][0-9]*)\.")
_KINDS = (("A", "embedding_A"), ("B", "embedding_B"))

Pieces = Mapping[int | None, Piece]  # by expert; None: of all experts


def check_halves(placed: Placed) -> None:
    """AdapterError that lists every lora_A whose lora_B is missing, every lora_B without lora_A,
    and what stands without either.
    """
    lonely = [*_of_linear(placed.linear.values()), *_of_experts(placed.experts.values())]
    if not lonely:
        return
    raise _incomplete([name for piece in lonely for name in _missing(piece)])


def check_half_keys(keys: Collection[str]) -> None:
    """The same from the keys alone, without a model: AdapterError that lists every missing half.

    A factor of all experts goes with those of single ones.
    """
    sides: dict[str, dict[str, str]] = {"A": {}, "B": {}}  # module -> key
    for key in keys:
        piece = parse_key(key, torch.empty(0))
        side = piece and next((kind[0][-1] for kind in _KINDS if piece.part in kind), None)
        if piece and side:
            sides[side][piece.module] = key
    missing = [*_unmatched(sides["A"], sides["B"]), *_unmatched(sides["B"], sides["A"])]
    if missing:
        raise _incomplete(missing)


def _unmatched(mine: Mapping[str, str], others: Collection[str]) -> Iterable[str]:
    """The other halves' keys of modules that `others` has neither by name nor by experts."""
    general = {_EXPERT.sub(".experts.", other) for other in others}
    for module, key in mine.items():
        of_all = _EXPERT.sub(".experts.", module)
        is_there = module in others or of_all in (general if of_all == module else others)
        if not is_there and (other := partner(key)):
            yield other


def _incomplete(missing: list[str]) -> AdapterError:
    verb = "is" if len(missing) == 1 else "are"
    return AdapterError(
        f"{counted(len(missing), 'key')} {verb} missing beside others of the same module:\n"
        f"{key_lines(missing)}\nThe file is incomplete: save the adapter again."
    )


def _missing(piece: Piece) -> list[str]:
    """The keys that belong to a lonely piece."""
    other = partner(piece.key)
    if other is not None and any(piece.part in kind for kind in _KINDS):
        return [other]
    head = piece.key.rpartition(".lora_")[0]
    return [f"{head}.lora_A.weight", f"{head}.lora_B.weight"]


def _of_linear(modules: Iterable[Mapping[str, Piece]]) -> Iterable[Piece]:
    for parts in modules:
        a, b = ([parts[part] for part in kind if part in parts] for kind in _KINDS)
        if not (a and b):
            yield from a or b or list(parts.values())[:1]


def _of_experts(modules: Iterable[Slots]) -> Iterable[Piece]:
    for slots in modules:
        for projection in {projection for projection, _ in slots}:
            a, b = (slots.get((projection, part), {}) for part in "AB")
            if a or b:
                yield from _unlike(a, b)
                continue
            others = next(by for (name, _), by in slots.items() if name == projection)
            yield next(iter(others.values()))


def _unlike(a: Pieces, b: Pieces) -> list[Piece]:
    """Pieces of one side alone; a factor of all experts goes with those of single ones."""
    if a and b and (set(a) == {None} or set(b) == {None}):
        return []
    return [*(a[e] for e in a if e not in b), *(b[e] for e in b if e not in a)]
