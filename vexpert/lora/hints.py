"""What may be meant by keys that have no place in the model: one hint for each group of them."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

import torch

from vexpert.config import shown
from vexpert.lora.key_lists import HOLE, fill, spans, split_numbers
from vexpert.lora.keys import PREFIX, parse_key
from vexpert.lora.names import Names
from vexpert.lora.types import ExpertsTarget, TargetMap

_NONE = torch.empty(0)  # keys are looked at without their tensors
_OTHER_NAMES = {".lora_down.": ".lora_A.", ".lora_up.": ".lora_B."}  # of other trainers
# Words in names of parts of a model that are no wrapper of the text model.
_OTHER_PARTS = ("vis", "image", "audio", "tower", "modal", "projector", "mtp")
OTHER_PART = "of a part beside the text model, which alone is served"


class Hints:
    """Compares keys without a place with the modules of one model."""

    def __init__(self, names: Names, targets: TargetMap) -> None:
        self._names = names
        self._general = sorted({_readable(split_numbers(path)[0]) for path in targets.targets})
        numbers = [split_numbers(path)[1] for path in targets.targets]
        self._layers = sorted({found[0] for found in numbers if found})
        experts = (t.num_experts for t in targets.targets.values() if isinstance(t, ExpertsTarget))
        self._experts = max(experts, default=0)

    def hint(self, key: str) -> str:
        """What to say behind `key`, "" or with "; " in front."""
        hints = (
            self._renamed,
            self._one_expert,
            self._spelling,
            self._number,
            self._prefix,
            self._other,
            self._near,
        )
        found = next((text for hint in hints if (text := hint(key))), "")
        return found and f"; {found}"

    def _is_known(self, key: str) -> bool:
        piece = parse_key(key, _NONE)
        return piece is not None and self._names.find(piece.module) is not None

    def _renamed(self, key: str) -> str:
        for old, new in _OTHER_NAMES.items():
            if self._is_known(key.replace(old, new)) and old in key:
                return f"PEFT's name of {old.strip('.')} is {new.strip('.')}: rename these keys"
        return ""

    def _one_expert(self, key: str) -> str:
        piece = parse_key(key, _NONE)
        place = None if piece is None else self._names.find(piece.module)
        if piece is None or piece.part != "param" or place is None or place.expert is None:
            return ""
        return (
            "a full weight of one expert (modules_to_save) cannot be applied for one adapter "
            "alone: merge it into the base model"
        )

    def _spelling(self, key: str) -> str:
        """Where numbers are right but for how they are written, such as "00"."""
        odd = {word: plain for word in key.split(".") if (plain := _plain(word)) != word}
        if not odd:
            return ""
        words = [odd.get(word, word) for word in key.split(".")]
        if not self._is_known(".".join(words)):
            return ""
        old, new = next(iter(odd.items()))
        return f"models number their modules 0, 1, 2, ...: write {new} in place of {shown(old)}"

    def _number(self, key: str) -> str:
        """Where another layer, or another expert, has such a module."""
        general, numbers = split_numbers(key)
        for at, number in enumerate(numbers):
            if number in self._layers if at == 0 else number < self._experts:
                continue  # it is not the number that is wrong
            for other in self._layers if at == 0 else range(min(1, self._experts)):
                if self._is_known(fill(general, (*numbers[:at], other, *numbers[at + 1 :]))):
                    if at:
                        return f"the model has experts {spans(range(self._experts))}"
                    return f"the model has {_layers(self._layers)}"
        return ""

    def _prefix(self, key: str) -> str:
        """Where what stands behind a prefix is the key of a module."""
        rest = key
        while (cut := rest.partition("."))[1]:
            rest = cut[2]
            if self._is_known(rest):
                prefix = key.removesuffix(rest)
                wrapper = prefix.removeprefix(PREFIX)
                if any(part in wrapper for part in _OTHER_PARTS):
                    return ""
                if key.count(PREFIX) > 1:
                    return (
                        "PEFT wrapped a model that it had wrapped before: take one "
                        f"{PREFIX!r} out of the keys"
                    )
                return f"without {wrapper!r} in front the model has it: take that out of the keys"
        return ""

    def _other(self, key: str) -> str:
        return OTHER_PART if is_other_part(key) else ""

    def _near(self, key: str) -> str:
        module = _readable(split_numbers(key)[0]).removeprefix(PREFIX).partition(".lora_")[0]
        near = get_close_matches(module, self._general, 1, 0.5)
        return f"nearest module of the model: {near[0]}" if near else ""


def is_other_part(key: str) -> bool:
    """Whether `key` is of a model's vision tower or the like, which is not served."""
    module = key.removeprefix(PREFIX).partition(".layers.")[0].partition(".lora_")[0]
    return any(word.startswith(_OTHER_PARTS) for word in re.split(r"[._]", module))


def _layers(numbers: Iterable[int]) -> str:
    found = list(numbers)
    is_row = len(found) > 1 and found == list(range(found[0], found[-1] + 1))
    if is_row:
        return f"layers {found[0]} to {found[-1]}"
    return f"layer {found[0]} alone" if len(found) == 1 else f"layers {spans(found)}"


def _plain(word: str) -> str:
    """`word` as models number their modules, where Python takes it for a whole number."""
    try:
        return str(int(word))
    except ValueError:  # also of one with too many digits
        return word


def _readable(general: str) -> str:
    return general.replace(HOLE, "N")
