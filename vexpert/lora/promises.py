"""What adapter_config.json promises, held against what the file holds.

PEFT saves every tensor of every module that it adapted, so a promised one that is missing was lost.
Other writers fill the config less exactly: there a name without tensors is a warning.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.excess import excess_error, excess_warning, find_excess, is_of_wrappers
from vexpert.lora.formats.full import is_router
from vexpert.lora.gaps import Gap, Gaps
from vexpert.lora.info import ListedNames
from vexpert.lora.key_lists import counted, grouped, key_lines, spans
from vexpert.lora.keys import PREFIX
from vexpert.lora.names import Place, layer_of, names_of
from vexpert.lora.selection import Selection
from vexpert.lora.types import EmbeddingTarget, ExpertsFactors, Factors, LinearTarget, TargetMap
from vexpert.lora.versions import is_pefts_own


@dataclass(frozen=True)
class Found:
    """What the file holds, by the model's own paths."""

    modules: Mapping[str, Factors | ExpertsFactors]
    tokens: Set[str]  # paths with trained token rows
    full: Set[str]  # parameters given whole, also where they equal the base's
    factors: Mapping[str, Place]  # modules with factors, as the file names them

    @property
    def full_modules(self) -> Set[str]:
        return {name.rpartition(".")[0] for name in self.full}


def check_promises(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    """Warnings of what may be missing; AdapterError for what PEFT always saves."""
    notes = [
        *_unknown("modules_to_save", _check_full(config, targets, found)),
        *_unknown("trainable_token_indices", _check_tokens(config, targets, found)),
    ]
    _check_biases(config, targets, found)
    return [*notes, *_check_factors(config, targets, found)]


def ends(paths: Iterable[str], name: str) -> bool:
    """Whether one of the paths is `name`, or ends with it behind a dot."""
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _incomplete(field: str, name: str, missing: Iterable[str] = ()) -> AdapterError:
    first = next((f" (first {path})" for path in missing), "")
    return AdapterError(
        f"adapter_config.json: {field} names {shown(name)}, but its tensors are not in the file"
        f"{first}: it is incomplete; save the adapter again, or take the name out of "
        "adapter_config.json if they were left out on purpose"
    )


def _unknown(field: str, names: list[str]) -> list[str]:
    """A warning of names that are of nothing in the model, such as heads for other tasks."""
    if not names:
        return []
    return [
        f"adapter_config.json: {field} names {_listed(names)}, which no module of the model is "
        "called: without effect"
    ]


def _check_full(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    """The names in modules_to_save that no module of the model has."""
    if not config.modules_to_save:
        return []
    known = {name.rpartition(".")[0] for name in targets.parameters} | targets.targets.keys()
    names = {  # modules_to_save may have thousands of names
        path: [f".{name}." for name in names_of(path, targets.model_type)] for path in sorted(known)
    }
    full = found.full_modules
    text = "\n".join(other for called in names.values() for other in called)
    unknown = []
    for name in config.modules_to_save:
        # A whole word, or else, by PEFT's rule, the end of one.
        for wanted in (f".{name}.", f"{name}."):
            if wanted not in text:  # most that are of nothing, at one look
                continue
            having = [path for path, called in names.items() if any(wanted in n for n in called)]
            missing = [p for p in having if p not in full and all(wanted in n for n in names[p])]
            if missing:
                raise _incomplete("modules_to_save", name, missing)
            if having:
                break
        else:
            unknown.append(name)
    return unknown


def _check_tokens(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    """The names in trainable_token_indices that no module of the model has."""
    unknown = []
    for name in config.token_indices:
        if not ends(targets.targets, name):
            unknown.append(name)
        elif not (ends(found.tokens, name) or _is_shared(name, config, targets, found)):
            raise _incomplete("trainable_token_indices", name)
    return unknown


def _is_shared(name: str, config: AdapterConfig, targets: TargetMap, found: Found) -> bool:
    """Whether PEFT saves the rows of `name` with those of the embedding that it is tied to."""
    indices = config.token_indices[name]
    return ends(targets.tied, name) and any(
        same == indices and other != name and ends(found.tokens, other)
        for other, same in config.token_indices.items()
    )


def _check_biases(config: AdapterConfig, targets: TargetMap, found: Found) -> None:
    """bias="all": of every Linear; "lora_only": of those with factors."""
    if config.bias == "none":
        return
    missing = [
        f"{path}.bias"
        for path, target in targets.targets.items()
        if isinstance(target, LinearTarget)
        and f"{path}.bias" in targets.parameters
        and f"{path}.bias" not in found.full
        and (config.bias == "all" or (path in found.modules and not is_router(path, targets)))
    ]
    if missing:
        if config.bias == "lora_only":
            raise AdapterError(
                f"adapter_config.json: bias={config.bias!r}, but "
                f"{counted(len(missing), 'bias', 'biases')} not in the file:\n"
                f"{key_lines(missing, 'bias', 'biases')}\n"
                'PEFT trains the biases of modules with factors under "lora_only", but does not '
                'save them, so they are lost: train with bias="all", or say "bias": "none" to use '
                "the adapter without them"
            )
        raise AdapterError(
            f"adapter_config.json: bias={config.bias!r}, but "
            f"{counted(len(missing), 'bias', 'biases')} not in the file:\n"
            f"{key_lines(missing, 'bias', 'biases')}\n"
            'It is incomplete: save the adapter again, or say "bias": "none" if they were not '
            "trained"
        )


def _check_factors(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    """Warnings of modules without factors, and of factors that the config leaves out; AdapterError
    where PEFT would have saved the first, or would drop the second.
    """
    gaps = Gaps(targets, found.factors, found.modules)
    lost = gaps.parameters(config.target_parameters)
    notes = []
    extra = []
    try:
        selection = Selection(config)
        lost += gaps.modules(selection)
        extra = find_excess(config, selection, targets, found.factors, found.modules)
    except AdapterError as error:
        notes.append(f"{error}; so whether file and config agree was not checked")
    sure = [gap for gap in lost if gap.by and gap.is_sure]
    if sure and _is_exact(config):
        raise _lost_error(sure, targets)
    dropped = [one for one in extra if one.is_sure]
    if dropped and _is_exact(config) and not is_of_wrappers(config):
        raise excess_error(config, dropped, targets)
    return [*notes, *_gap_warnings(lost, found), *([excess_warning(extra)] if extra else [])]


def _is_exact(config: AdapterConfig) -> bool:
    """Whether PEFT wrote the config, which then names no more than was saved."""
    return config.names_version or is_pefts_own(config.fields)


def _lost_error(lost: list[Gap], targets: TargetMap) -> AdapterError:
    names = {gap.field: dict.fromkeys(g.by for g in lost if g.field == gap.field) for gap in lost}
    named = " and ".join(f"{field} names {_listed(names[field])}" for field in names)
    keys = [key for gap in lost for key in _keys(gap, targets)]
    return AdapterError(
        f"adapter_config.json: {named}, but {counted(len(keys), 'key')} that PEFT saves for that "
        f"{'is' if len(keys) == 1 else 'are'} not in the file:\n{key_lines(keys)}\n"
        f"The file is incomplete: save the adapter again. {_remedy(names)}"
    )


def _keys(gap: Gap, targets: TargetMap) -> list[str]:
    is_table = isinstance(targets.targets[gap.path], EmbeddingTarget)
    form = "lora_embedding_{}" if is_table else "lora_{}.weight"
    return [f"{PREFIX}{gap.name}.{form.format(part)}" for part in "AB"]


def _remedy(fields: Collection[str]) -> str:
    ways = []
    if "target_modules" in fields:
        ways.append("exclude_modules or layers_to_transform")
    if "target_parameters" in fields:
        ways.append("the full names of those that are there in target_parameters")
    how = " and ".join(ways)
    return f"If they were left out on purpose, say so in adapter_config.json with {how}."


def _listed(names: Iterable[str], most: int = 5) -> str:
    """Names for a message, the first few of many."""
    found = [shown(name) for name in names]
    return str(ListedNames(found[:most], len(found) - most))


def _gap_warnings(lost: list[Gap], found: Found) -> list[str]:
    """One sentence for each field of the config, one for what no field is about."""
    layers = {layer_of(path) for path in found.modules}
    by_field: dict[str, list[Gap]] = {}
    for gap in lost:
        by_field.setdefault(gap.field if gap.by else "", []).append(gap)
    return [_gap_warning(field, gaps, layers) for field, gaps in by_field.items()]


def _gap_warning(field: str, gaps: list[Gap], layers: Set[int | None]) -> str:
    what = f"{counted(len(gaps), 'module')} of the model without factors in the file"
    if field:
        what = f"adapter_config.json: {field} names {what}; unchanged"
    else:
        whose = "its" if len(gaps) == 1 else "their"
        what = f"{what}, though others of {whose} kind have them; unchanged"
    groups = [group.text for group in grouped(gap.name for gap in gaps)]
    more = ", ..." if len(groups) > 3 else ""
    gone = sorted({n for n in (layer_of(gap.path) for gap in gaps) if n is not None} - layers)
    whose = f"layer {gone[0]} has" if len(gone) == 1 else f"layers {spans(gone)} have"
    note = f"; {whose} none at all" if gone else ""
    return f"{what}: {', '.join(groups[:3])}{more}{note}"
