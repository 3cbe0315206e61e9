"""Factors in the file of modules that the config leaves out: PEFT drops such tensors silently."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.key_lists import counted, grouped, key_lines, spans
from vexpert.lora.keys import PREFIX, WRAPPERS
from vexpert.lora.names import Place, layer_of
from vexpert.lora.selection import EVERYTHING, Selection
from vexpert.lora.types import EmbeddingTarget, ExpertsFactors, ExpertsTarget, Factors, TargetMap

# What target_modules calls the projections of experts in models of transformers 4; PEFT turns these
# names into target_parameters on transformers 5.
_WORDS = {
    "gate_up": (
        "gate_proj",
        "up_proj",
        "w1",
        "w3",
        "gate_up_proj",
        "gate_up_projs",
        "input_linear",
    ),
    "down": ("down_proj", "w2", "down_projs", "output_linear"),
}


class Excess(NamedTuple):
    """One module, or parameter of experts, with factors that the config does not mean."""

    by: str  # the field that leaves it out
    wanted: str  # what would have to be there
    name: str  # of the module in the file
    path: str  # in the model
    is_sure: bool  # whatever the version, PEFT leaves it out


def find_excess(
    config: AdapterConfig,
    selection: Selection,
    targets: TargetMap,
    factors: Mapping[str, Place],
    modules: Mapping[str, Factors | ExpertsFactors],
) -> list[Excess]:
    """Every such module; none where the config says nothing. AdapterError for bad patterns.

    `factors`: place of each module of the file that has factors; `modules`: as read.
    """
    if selection.is_open and not (config.target_parameters and config.target_modules != EVERYTHING):
        return []
    wrapped: dict[str, dict[str, str]] = {}  # path -> inner, outer -> name in the file
    found = []
    for name, place in factors.items():
        if place.projection in ("inner", "outer"):
            wrapped.setdefault(place.path, {})[place.projection] = name
        elif by := _left_out(config, selection, targets, name, place):
            word = name.rpartition(".")[2]
            found.append(Excess(by, word, name, place.path, not selection.is_open))
    for path, names in wrapped.items():
        found += _of_wrappers(config, selection, targets.targets[path], names, modules.get(path))
    return found


def _left_out(
    config: AdapterConfig, selection: Selection, targets: TargetMap, name: str, place: Place
) -> str:
    """The field that leaves out one module; "": it may be meant, by its own name or the model's."""
    by = selection.left_out_by(name)
    if not by:
        return ""
    keys = [f"{name}.weight", f"{place.path}.weight"]
    target = targets.targets[place.path]
    if isinstance(target, ExpertsTarget):
        keys.append(f"{place.path}.{_parameter(target, place.projection)}")
    elif name != place.path and not selection.left_out_by(place.path):
        return ""
    return "" if any(_is_named(config.target_parameters, key) for key in keys) else by


def _of_wrappers(
    config: AdapterConfig,
    selection: Selection,
    target: object,
    names: Mapping[str, str],
    read: object,
) -> Iterable[Excess]:
    """Of one experts module with PEFT's wrappers."""
    assert isinstance(target, ExpertsTarget)
    assert isinstance(read, ExpertsFactors)
    have = [("gate_up", read.up is not None or read.gate is not None)]
    have.append(("down", read.down is not None))
    outer = names.get("outer") or next(iter(names.values()))
    for projection, is_there in have:
        parameter = _parameter(target, projection)
        keys = (f"{target.path}.{parameter}", f"{outer}.{parameter}")
        is_meant = any(_is_named(config.target_parameters, key) for key in keys)
        is_meant = is_meant or _is_converted(config, selection, target.path, projection)
        if is_there and not is_meant:
            name = names.get("inner", outer) if projection == "gate_up" else outer
            yield Excess("target_parameters", f"experts.{parameter}", name, target.path, True)


def _parameter(target: ExpertsTarget, projection: str) -> str:
    if projection == "down":
        return "down_proj"
    return "gate_up_proj" if target.has_gate else "up_proj"


def _is_named(names: tuple[str, ...], key: str) -> bool:
    return any(key == name or key.endswith(f".{name}") for name in names)


def _is_converted(config: AdapterConfig, selection: Selection, path: str, projection: str) -> bool:
    """Whether target_modules means the experts of `path`, as transformers 4 called them."""
    words, wanted = _WORDS[projection], config.target_modules
    if isinstance(wanted, str) and any(word in wanted for word in words):
        return True
    names = [f"{path}.{middle}{word}" for word in words for middle in ("", "0.")]
    return wanted == EVERYTHING or not all(map(selection.left_out_by, names))


def is_of_wrappers(config: AdapterConfig) -> bool:
    """Whether the config's names have trainers' wrappers in them, which keys are read without."""
    names = [config.target_modules, config.exclude_modules, *config.target_parameters]
    return any(wrapper.rstrip(".") in str(name) for name in names for wrapper in WRAPPERS)


def excess_error(config: AdapterConfig, found: list[Excess], targets: TargetMap) -> AdapterError:
    """The refusal: every key, and how to make config and file agree."""
    keys = [key for one in found for key in _keys(one, targets)]
    fields = dict.fromkeys(one.by for one in found)
    verb, it = ("is", "it") if len(keys) == 1 else ("are", "them")
    ways = ", ".join(_remedy(config, field, found) for field in fields)
    return AdapterError(
        f"{counted(len(keys), 'key')} of the file {verb} for modules that adapter_config.json "
        f"leaves out ({', '.join(fields)}): PEFT drops {it} without a word:\n{key_lines(keys)}\n"
        f"If they belong to the adapter, {ways}; else remove these tensors from the file."
    )


def excess_warning(found: list[Excess]) -> str:
    """One sentence for configs of other writers."""
    groups = [group.text for group in grouped(one.name for one in found)]
    more = ", ..." if len(groups) > 3 else ""
    fields = ", ".join(dict.fromkeys(one.by for one in found))
    return (
        f"adapter_config.json: {fields} leaves out {counted(len(found), 'module')} with factors in "
        f"the file; applied, though PEFT would drop them: {', '.join(groups[:3])}{more}"
    )


def _keys(one: Excess, targets: TargetMap) -> list[str]:
    is_table = isinstance(targets.targets[one.path], EmbeddingTarget)
    form = "lora_embedding_{}" if is_table else "lora_{}.weight"
    return [f"{PREFIX}{one.name}.{form.format(part)}" for part in "AB"]


def _remedy(config: AdapterConfig, field: str, found: Collection[Excess]) -> str:
    mine = [one for one in found if one.by == field]
    if field == "exclude_modules":
        return "keep exclude_modules from matching them"
    if field == "layers_to_transform":
        layers = {layer for one in mine if (layer := layer_of(one.path)) is not None}
        if layers:
            return f"add {spans(layers)} to layers_to_transform"
        return "leave out layers_to_transform"
    words = [shown(word) for word in dict.fromkeys(one.wanted for one in mine)]
    names = ", ".join(words[:10]) + (", ..." if len(words) > 10 else "")
    if field == "target_modules" and isinstance(config.target_modules, str):
        return f"let the pattern target_modules match {names}"
    return f"add {names} to {field}"
