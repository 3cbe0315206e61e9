"""PEFT's rule of which modules a config adapts, by their names in the trainer's model."""

import re
from collections.abc import Callable

from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.matchers import Clock, Matcher

SECONDS = 1.0  # for target_modules and exclude_modules given as patterns
EVERYTHING = "all-linear"  # PEFT replaces it by names before it saves; other writers do not

# The number of a module's layer: PEFT takes the first one in the name, older versions the last.
_LAYER = (r".*?\.[^.]*\.(\d+)\.", r".*\.[^.]*\.(\d+)\.")


class Selection:
    """`chosen(name)`: what in target_modules names a module. AdapterError for bad patterns."""

    def __init__(self, config: AdapterConfig) -> None:
        clock = Clock(SECONDS)
        wanted = config.target_modules
        self.is_open = wanted in ((), "", EVERYTHING)  # does not say which modules
        self._pattern = wanted if isinstance(wanted, str) else ""
        self._names = frozenset(() if isinstance(wanted, str) else wanted)
        self._matches = _rule("target_modules", self._pattern, clock)
        self._excluded = _rule("exclude_modules", config.exclude_modules, clock)
        self._saved = tuple(f".{name}." for name in config.modules_to_save)
        self._layers = frozenset(config.layers_to_transform)
        self._is_layer_open = not all(map(_is_plain, config.layers_pattern))
        self._readings = _readings(config.layers_pattern)

    def chosen(self, name: str) -> str | None:
        """The name in target_modules, or the pattern, that means the module `name`; else None."""
        dotted = f".{name}."
        if any(saved in dotted for saved in self._saved) or self._excluded(name):
            return None
        if self._pattern:
            return self._pattern if self._matches(name) else None
        if name in self._names:
            return name
        found = next((end for end in _ends(name) if end in self._names), None)
        return found if self._is_in_layers(name) else None

    def left_out_by(self, name: str) -> str:
        """The field by which every PEFT leaves the module `name` out; "": some version adapts it.

        What modules_to_save names counts as adapted here: it is no reason to drop factors.
        """
        if self._excluded(name):
            return "exclude_modules"
        if self._pattern:
            return "" if self._matches(name) else "target_modules"
        if name in self._names:
            return ""
        if not self._is_end(name):
            return "target_modules"
        return "" if self._may_be_in_layers(name) else "layers_to_transform"

    def _is_end(self, name: str) -> bool:
        """Whether target_modules has an end of `name`; most are its last word."""
        return name.rpartition(".")[2] in self._names or not self._names.isdisjoint(_ends(name))

    def _may_be_in_layers(self, name: str) -> bool:
        """Whether some PEFT takes `name` to be in one of layers_to_transform."""
        if not self._layers or self._is_layer_open:
            return True
        return any(reading(name) in self._layers for reading in self._readings)

    def _is_in_layers(self, name: str) -> bool:
        """Whether every PEFT takes `name` to be in one of layers_to_transform."""
        return not self._layers or all(
            (layer := reading(name)) is not None and layer in self._layers
            for reading in self._readings
        )


def _ends(name: str) -> list[str]:
    """What stands behind each dot of `name`."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(1, len(words))]


def _rule(field: str, names: tuple[str, ...] | str, clock: Clock) -> Callable[[str], bool]:
    if not names:
        return lambda name: False
    if isinstance(names, str):
        return Matcher(field, names, rf"(?:{names})\Z", clock).matches
    known = frozenset(names)
    return lambda name: name in known or any(end in known for end in _ends(name))


def _readings(patterns: tuple[str, ...]) -> list[Callable[[str], int | None]]:
    """The number of a module's layer, as PEFT's versions find it."""
    if not patterns:
        return [_layer_by([expression]) for expression in _LAYER]
    if not all(map(_is_plain, patterns)):
        return [lambda name: None]  # an expression: which layers it means is left open
    return [
        _layer_by([rf"(?:^|.*{lazy}\.){re.escape(pattern)}\.(\d+)\." for pattern in patterns])
        for lazy in ("?", "")
    ]


def _is_plain(pattern: str) -> bool:
    """Whether layers_pattern has a name and no expression."""
    return re.fullmatch(r"[\w.]+", pattern) is not None


def _layer_by(expressions: list[str]) -> Callable[[str], int | None]:
    compiled = [re.compile(expression) for expression in expressions]

    def layer(name: str) -> int | None:
        found = next((m for m in (c.match(name) for c in compiled) if m is not None), None)
        return None if found is None else int(found[1])

    return layer
