"""Modules that a config means, or that others of their kind suggest, and that the file lacks."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vexpert.lora.key_lists import HOLE, Numbers, fill, split_numbers
from vexpert.lora.names import Place, names_of, tail
from vexpert.lora.selection import Selection
from vexpert.lora.types import ExpertsFactors, ExpertsTarget, Factors, TargetMap

# Names of the projections of one expert: a trainer's model has all of one row.
_STYLES = (
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"w1": "gate", "w3": "up", "w2": "down"},
    {"gate_up_projs": "gate_up", "down_projs": "down"},
)


class Gap(NamedTuple):
    """One module without factors."""

    field: str  # target_modules or target_parameters
    by: str  # what there means it; "": nothing, but the file has the same of other layers
    name: str  # in the trainer's model
    path: str  # in ours
    is_sure: bool  # PEFT would have adapted it


class _Group(NamedTuple):
    """Modules of the file that differ in their numbers alone."""

    name: str  # general
    path: str  # general, of the model's module
    projection: str
    is_per_expert: bool


Modules = Mapping[str, Factors | ExpertsFactors]
Members = dict[Numbers, set[int]]  # numbers in the path -> experts; none where not per expert


class Gaps:
    """Compares one file's modules with the model's."""

    def __init__(self, targets: TargetMap, factors: Mapping[str, Place], modules: Modules) -> None:
        """`factors`: place of each module of the file that has factors; `modules`: as read."""
        self._targets = targets.targets
        self._model_type = targets.model_type
        self._modules = modules
        self._names = factors.keys()
        self._paths: dict[str, dict[Numbers, str]] = {}  # by general path
        for path in targets.targets:
            general, numbers = split_numbers(path)
            self._paths.setdefault(general, {})[numbers] = path
        self._groups = _groups(factors)
        self._prefixes = _prefixes(factors)
        self._is_older = any(
            tail(name) in map(tail, names_of(place.path, targets.model_type)[1:])
            for name, place in factors.items()
        )

    def modules(self, selection: Selection) -> list[Gap]:
        """Gaps that target_modules does not explain."""
        groups = {g: m for g, m in self._groups.items() if g.projection not in ("inner", "outer")}
        if not selection.is_open:
            groups |= {group: {} for group in self._siblings()}
        found = [gap for group, have in groups.items() for gap in self._of(group, have, selection)]
        return found if selection.is_open else [*found, *self._absent(selection)]

    def parameters(self, names: tuple[str, ...]) -> list[Gap]:
        """Parameters without factors that target_parameters, `names`, means.

        Without names: where the file has PEFT's wrappers of experts, those of other layers.
        """
        if not names and not any(g.projection in ("inner", "outer") for g in self._groups):
            return []
        found = []
        usual: set[str] = set()
        for path, target in self._targets.items():
            rows = list(_parameters(path, target, self._modules.get(path)))
            chosen = [_chosen(names, key) for key, _ in rows]
            for at, (key, is_there) in enumerate(rows):
                if is_there and isinstance(target, ExpertsTarget):
                    usual.add(split_numbers(key)[0])
                if not is_there and (chosen[at] or not names):
                    # Of two wrapped parameters the first has the inner wrapper.
                    others = [chosen[i] or there or not names for i, (_, there) in enumerate(rows)]
                    name = self._trainers(path) + (".base_layer" if any(others[at + 1 :]) else "")
                    found.append((key, Gap("target_parameters", chosen[at], name, path, True)))
        return [gap for key, gap in found if gap.by or split_numbers(key)[0] in usual]

    def _has(self, path: str, projection: str) -> bool:
        """Whether factors of this projection were read, in whatever format."""
        module = self._modules.get(path)
        if not isinstance(module, ExpertsFactors):
            return module is not None
        if projection == "gate_up":
            return module.gate is not None or module.up is not None
        return getattr(module, projection) is not None

    def _of(self, group: _Group, have: Members, selection: Selection) -> Iterable[Gap]:
        for numbers, path in self._paths.get(group.path, {}).items():
            if numbers not in have and self._has(path, group.projection):
                continue  # in another format
            for missing in self._missing(group, path, have.get(numbers)):
                name = fill(group.name, (*numbers, *missing))
                by = "" if selection.is_open else selection.chosen(name)
                if by is not None:
                    yield Gap("target_modules", by, name, path, True)

    def _missing(self, group: _Group, path: str, have: set[int] | None) -> Iterable[Numbers]:
        """What to put behind the path's own numbers: nothing, or the experts that lack it."""
        if not group.is_per_expert:
            return [()] if have is None else []
        target = self._targets[path]
        assert isinstance(target, ExpertsTarget)
        return [(expert,) for expert in range(target.num_experts) if expert not in (have or ())]

    def _siblings(self) -> Iterable[_Group]:
        """The other projections of the experts that the file has one by one."""
        have = {(group.path, group.projection) for group in self._groups if group.is_per_expert}
        for group in self._groups:
            word = next((w for w in group.name.split(".")[-2:] if w != HOLE), "")
            style = next((style for style in _STYLES if word in style), {})
            first = next(iter(self._paths[group.path].values()))
            target = self._targets[first]
            if not group.is_per_expert or not isinstance(target, ExpertsTarget):
                continue
            for other, projection in style.items():
                is_known = (group.path, projection) in have
                if not is_known and (target.has_gate or projection != "gate"):
                    name = f".{other}".join(group.name.rsplit(f".{word}", 1))
                    yield _Group(name, group.path, projection, True)

    def _absent(self, selection: Selection) -> Iterable[Gap]:
        """Modules that are no experts, of kinds that the file has none of."""
        have = {group.path for group in self._groups}
        stacks = {_stack(path) for path in have} | {""}
        for general, members in self._paths.items():
            if general in have or isinstance(
                self._targets[next(iter(members.values()))], ExpertsTarget
            ):
                continue
            for path in members.values():
                name, *others = self._names_of(path)
                by = selection.chosen(name)
                if by is not None and all(selection.chosen(n) is not None for n in others):
                    # Another stack, such as a vision tower: the trainer's model may lack it.
                    is_sure = _stack(general) in stacks or not self._is_used(by)
                    yield Gap("target_modules", by, name, path, is_sure)

    def _is_used(self, by: str) -> bool:
        return any(name == by or name.endswith(f".{by}") for name in self._names)

    def _names_of(self, path: str) -> list[str]:
        """What the trainer's model may call a module of ours; first, what the file suggests."""
        names = [self._trainers(name) for name in names_of(path, self._model_type)]
        if self._is_older and len(names) > 1:
            names.reverse()
        return names

    def _trainers(self, path: str) -> str:
        """The name that the trainer's model has for a module of ours, as far as prefixes go."""
        ours, theirs = self._prefixes
        return theirs + path.removeprefix(ours) if path.startswith(ours) else path


def _groups(factors: Mapping[str, Place]) -> dict[_Group, Members]:
    # Thousands of experts share a path and a projection: their names are taken apart once.
    examples: dict[tuple[str, str, bool], str] = {}
    experts: dict[tuple[str, str, bool], set[int]] = {}
    for name, place in factors.items():
        key = place.path, place.projection, place.expert is not None
        examples.setdefault(key, name)
        numbers = experts.setdefault(key, set())
        if place.expert is not None:
            numbers.add(place.expert)
    groups: dict[_Group, Members] = {}
    for key, name in examples.items():
        path, projection, is_per_expert = key
        general, numbers_there = split_numbers(name)
        general_path, own = split_numbers(path)
        if len(numbers_there) == len(own) + is_per_expert:
            group = _Group(general, general_path, projection, is_per_expert)
            groups.setdefault(group, {})[own] = experts[key]
    return groups


def _prefixes(factors: Mapping[str, Place]) -> tuple[str, str]:
    """What stands before the same name of one module in our model and in the trainer's."""
    for name, place in factors.items():
        end = tail(place.path)
        if end != place.path and name.endswith(f".{end}"):
            return place.path.removesuffix(end), name.removesuffix(end)
    return "", ""


def _parameters(
    path: str, target: object, factors: Factors | ExpertsFactors | None
) -> Iterable[tuple[str, bool]]:
    """(parameter, whether it has factors) of one module, in order of declaration."""
    if not isinstance(target, ExpertsTarget):
        yield f"{path}.weight", factors is not None
        return
    pair = factors if isinstance(factors, ExpertsFactors) else ExpertsFactors()
    first = "gate_up_proj" if target.has_gate else "up_proj"
    yield f"{path}.{first}", pair.up is not None or pair.gate is not None
    yield f"{path}.down_proj", pair.down is not None


def _chosen(names: tuple[str, ...], key: str) -> str:
    """The name in target_parameters that means the parameter `key`, or ""."""
    return next((name for name in names if key == name or key.endswith(f".{name}")), "")


def _stack(general: str) -> str:
    """What stands before the layer's number: where a row of layers lies."""
    return general.rpartition(HOLE)[0]
