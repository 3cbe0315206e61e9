"""Sorts the pieces of a file by the module of the model they belong to; refuses what has none."""

from dataclasses import dataclass, field
from typing import TypeVar

from vexpert.config import printable
from vexpert.errors import AdapterError
from vexpert.lora.files import Tensors
from vexpert.lora.formats.full import parameter_shape
from vexpert.lora.hints import Hints, is_other_part
from vexpert.lora.key_lists import (
    MOST_LINES,
    counted,
    grouped,
    key_lines,
    limited,
    split_numbers,
)
from vexpert.lora.keys import Piece, Slots, parse_key
from vexpert.lora.names import Names, Place
from vexpert.lora.types import ExpertsTarget, TargetMap

K = TypeVar("K")


@dataclass
class Placed:
    """Every piece of a file, by target path."""

    linear: dict[str, dict[str, Piece]] = field(default_factory=dict)  # by part
    experts: dict[str, Slots] = field(default_factory=dict)
    tokens: dict[str, Piece] = field(default_factory=dict)
    full: list[tuple[str, Piece]] = field(default_factory=list)
    factors: dict[str, Place] = field(default_factory=dict)  # by module, as the file names it


def place(tensors: Tensors, targets: TargetMap) -> Placed:
    """All pieces placed, or an AdapterError that lists every key without a place."""
    names = Names(targets)
    placed = Placed()
    lost: list[str] = []
    fixed: list[str] = []  # the model has the module, but no adapter can change it
    adapters: set[str] = set()
    for key, tensor in tensors.items():
        piece = parse_key(key, tensor)
        found = names.find(piece.module) if piece is not None else None
        if piece is None or found is None or not _put(placed, piece, found, targets):
            (fixed if _is_fixed(piece, found, targets) else lost).append(key)
            continue
        if piece.part not in ("param", "tokens"):
            placed.factors[piece.module] = found
        if piece.adapter:
            adapters.add(printable(piece.adapter))
    if lost:
        raise AdapterError(_lost_message(lost, names, targets))
    if fixed:
        raise AdapterError(_fixed_message(fixed, targets))
    if len(adapters) > 1:
        raise AdapterError(
            f"the file holds several adapters, {', '.join(sorted(adapters))}; save one alone"
        )
    return placed


def _put(placed: Placed, piece: Piece, found: Place, targets: TargetMap) -> bool:
    """Add the piece; False when the module cannot have such a tensor."""
    target = targets.targets.get(found.path)
    if piece.part == "param":
        name = f"{found.path}.{piece.param}"
        if parameter_shape(name, targets) is None or found.projection not in ("", "outer"):
            return False
        placed.full.append((found.path, piece))
        return True
    if target is None:
        return False
    if piece.part == "tokens":
        if isinstance(target, ExpertsTarget):
            return False
        _once(placed.tokens, found.path, piece)
    elif isinstance(target, ExpertsTarget):
        slots = placed.experts.setdefault(found.path, {})
        _once(slots.setdefault((found.projection, piece.part), {}), found.expert, piece)
    else:
        _once(placed.linear.setdefault(found.path, {}), piece.part, piece)
    return True


def _is_fixed(piece: Piece | None, found: Place | None, targets: TargetMap) -> bool:
    """Whether factors or token rows are for a module that the model has, but is no target."""
    if piece is None or found is None or piece.part == "param":
        return False
    return found.path not in targets.targets


def _once(table: dict[K, Piece], at: K, piece: Piece) -> None:
    if at in table:
        raise AdapterError(f"{table[at].key} and {piece.key} are the same factor twice; keep one")
    table[at] = piece


def _lost_message(lost: list[str], names: Names, targets: TargetMap) -> str:
    """All keys, grouped by their names, each group with what may be meant."""
    hints = Hints(names, targets)
    examples = {_general(key): key for key in reversed(lost)}
    told: dict[str, str] = {}
    lines = []
    for group in grouped(lost)[: MOST_LINES + 1]:
        general = group.general.replace("{A,B}", "A")
        if general not in told:
            told[general] = hints.hint(examples[general]) if general in examples else ""
        lines.append(f"  {group.text} ({counted(group.size, 'key')}{told[general]})")
    verb = "has" if len(lost) == 1 else "have"
    return (
        f"{counted(len(lost), 'key')} of the adapter {verb} no place in {targets.architecture}:\n"
        f"{limited(lines)}\n{_reason(lost)}"
    )


def _reason(lost: list[str]) -> str:
    if all(map(is_other_part, lost)):
        return (
            "The adapter changes parts of its model that are not served: train with them in "
            "exclude_modules, or remove these tensors if requests have text alone."
        )
    return "The adapter was made for another base model, or in a format that is not known."


def _fixed_message(fixed: list[str], targets: TargetMap) -> str:
    return (
        f"{targets.architecture} has the modules of {counted(len(fixed), 'key')}, but not as a "
        f"plain Linear or embedding, so one adapter alone cannot change them:\n{key_lines(fixed)}\n"
        "Train without them, or merge the adapter into the base model."
    )


def _general(key: str) -> str:
    return split_numbers(key)[0]
