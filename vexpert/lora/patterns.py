"""PEFT's rank_pattern and alpha_pattern: which value a module gets, whichever PEFT trained it.

PEFT takes the first pattern that matches, in the trainer's order. Its `save_pretrained` sorts the
keys, so a sorted table has lost that order; any other one still has it. How patterns are matched
has changed twice; where the config does not show its writer, all that may be must agree.
"""

from collections.abc import Sequence

from vexpert.errors import AdapterError
from vexpert.lora.matchers import Clock
from vexpert.lora.pattern_tables import PatternFields, Reading, is_converted, make_reading


class Patterns:
    """Both tables of a config and the values of modules that no pattern matches."""

    def __init__(self, fields: PatternFields, rules: Sequence[str]) -> None:
        """`rules`: of vexpert.lora.versions.PATTERN_RULES, those of versions that may have written
        the config. AdapterError for a pattern that is none to any of them.
        """
        # One rule is enough; PEFT that converts is a new one.
        is_one = not (fields.ranks or fields.alphas) or is_converted(fields)
        clock = Clock()
        self._readings: dict[str, Reading] = {}
        errors: list[AdapterError] = []
        for rule in rules[-1:] if is_one else rules:
            try:
                self._readings[rule] = make_reading(rule, fields, clock)
            except AdapterError as error:  # then that version could not have trained with it
                errors.append(error)
        if not self._readings:
            raise errors[-1]

    def unused(self) -> dict[str, list[str]]:
        """By field, the patterns that have matched no name so far, PEFT's own aside."""
        first, *others = (reading.unused for reading in self._readings.values())
        found = {
            field: [p for p in patterns if all(p in other[field] for other in others)]
            for field, patterns in first.items()
        }
        return {field: patterns for field, patterns in found.items() if patterns}

    def ranks(self, name: str) -> frozenset[int | None]:
        """The ranks that the config may mean for `name`; None: it states none."""
        return frozenset().union(*(reading.ranks(name) for reading in self._readings.values()))

    def alpha(self, name: str, rank: int) -> tuple[float, str]:
        """lora_alpha of `name`, whose rank in the file is `rank`; and what was assumed, or "".

        AdapterError where patterns of different values match and nothing tells which came first,
        and where versions that may have written the config would differ.
        """
        if len(self._readings) == 1:
            return next(iter(self._readings.values())).alpha(name, rank)
        found = {rule: reading.alpha(name, rank) for rule, reading in self._readings.items()}
        if len({alpha for alpha, _ in found.values()}) == 1:
            return next(iter(found.values()))
        fitting = [
            rule
            for rule, reading in self._readings.items()
            if not {rank, None}.isdisjoint(reading.ranks(name))
        ]
        alphas = {found[rule][0] for rule in fitting}
        if len(alphas) != 1:
            raise AdapterError(_differ({rule: alpha for rule, (alpha, _) in found.items()}, name))
        note = (
            f"rank_pattern and alpha_pattern read as PEFT {' or '.join(fitting)} does: rank {rank} "
            f"of {name} fits no other; if not, {_REMEDY}"
        )
        return alphas.pop(), note


_REMEDY = 'add the trainer\'s version to adapter_config.json, such as "peft_version": "0.13.2"'


def _differ(found: dict[str, float], name: str) -> str:
    """`found`: alpha by rule."""
    readings = ", ".join(f"{alpha:g} (PEFT {rule})" for rule, alpha in found.items())
    return (
        f"rank_pattern and alpha_pattern give {name} a lora_alpha of {readings}, and "
        f"adapter_config.json does not show which version wrote it: {_REMEDY}"
    )
