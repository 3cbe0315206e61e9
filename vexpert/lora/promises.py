"""What adapter_config.json promises, held against what the file holds.

PEFT saves every tensor of every module that it adapted, so a promised one that is missing was lost.
Other writers fill the config less exactly: there a name without tensors is a warning.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.formats.full import is_router
from vexpert.lora.patterns import Clock, Matcher
from vexpert.lora.types import (
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    LinearTarget,
    TargetMap,
)
from vexpert.lora.versions import is_pefts_own

SECONDS = 1.0  # for target_modules and exclude_modules given as patterns


@dataclass(frozen=True)
class Found:
    """What the file holds, by the model's own paths."""

    modules: Mapping[str, Factors | ExpertsFactors]
    tokens: Set[str]  # paths with trained token rows
    full: Set[str]  # parameters given whole, also where they equal the base's
    names: Set[str]  # modules as the file names them

    @property
    def full_modules(self) -> Set[str]:
        return {name.rpartition(".")[0] for name in self.full}


def check_promises(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    """Warnings of what may be missing; AdapterError for what PEFT always saves."""
    _check_full(config, targets, found)
    _check_tokens(config, targets, found)
    _check_biases(config, targets, found)
    return [
        *_check_factors("target_parameters", _parameters(config, targets, found), config, found),
        *_check_modules(config, targets, found),
    ]


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


def _check_full(config: AdapterConfig, targets: TargetMap, found: Found) -> None:
    known = {name.rpartition(".")[0] for name in targets.parameters} | targets.targets.keys()
    for name in config.modules_to_save:
        missing = [
            path
            for path in sorted(known)
            if f".{name}." in f".{path}." and path not in found.full_modules
        ]
        if missing:
            raise _incomplete("modules_to_save", name, missing)


def _check_tokens(config: AdapterConfig, targets: TargetMap, found: Found) -> None:
    for name in config.token_indices:
        if ends(targets.targets, name) and not ends(found.tokens, name):
            raise _incomplete("trainable_token_indices", name)


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
        raise AdapterError(
            f"adapter_config.json: bias={config.bias!r}, but {len(missing)} biases are not in the "
            f"file (first {missing[0]}): it is incomplete; save the adapter again, or say "
            '"bias": "none" if they were not trained'
        )


Expected = dict[str, dict[str, bool]]  # name in the config -> what it means -> is it there


def _parameters(config: AdapterConfig, targets: TargetMap, found: Found) -> Expected:
    have = dict(_have(targets, found))
    return {
        name: {key: there for key, there in have.items() if ends([key], name)}
        for name in config.target_parameters
    }


def _have(targets: TargetMap, found: Found) -> Iterable[tuple[str, bool]]:
    """(parameter, whether it has factors) of all that target_parameters can name."""
    for path, target in targets.targets.items():
        factors = found.modules.get(path)
        if isinstance(target, ExpertsTarget):
            pair = factors if isinstance(factors, ExpertsFactors) else ExpertsFactors()
            first = "gate_up_proj" if target.has_gate else "up_proj"
            yield f"{path}.{first}", pair.up is not None or pair.gate is not None
            yield f"{path}.down_proj", pair.down is not None
        else:
            yield f"{path}.weight", factors is not None


def _check_modules(config: AdapterConfig, targets: TargetMap, found: Found) -> list[str]:
    try:
        expected = _modules(config, targets)
    except AdapterError as error:
        return [f"{error}; so whether the file is complete was not checked"]
    there = {
        name: {path: path in found.modules for path in paths} for name, paths in expected.items()
    }
    return _check_factors("target_modules", there, config, found)


def _modules(config: AdapterConfig, targets: TargetMap) -> dict[str, list[str]]:
    """Linear modules and embeddings by the name in target_modules that means them."""
    wanted = config.target_modules
    clock = Clock(SECONDS)
    rules = {wanted: _rule("target_modules", wanted, clock)} if isinstance(wanted, str) else {}
    if not isinstance(wanted, str):
        rules = {name: _rule("target_modules", (name,), clock) for name in wanted}
    excluded = _rule("exclude_modules", config.exclude_modules, clock)
    layers = set(config.layers_to_transform if not isinstance(wanted, str) else ())
    candidates = [
        path
        for path, target in targets.targets.items()
        if not isinstance(target, ExpertsTarget)
        and not any(f".{name}." in f".{path}." for name in config.modules_to_save)
        and (not layers or _layer(path) in layers)
    ]
    return {
        name: [path for path in candidates if rule(path) and not excluded(path)]
        for name, rule in rules.items()
    }


def _rule(field: str, names: tuple[str, ...] | str, clock: Clock) -> Callable[[str], bool]:
    if isinstance(names, str):
        if not names:
            return lambda path: False
        return Matcher(field, names, rf"(?:{names})\Z", clock).matches
    return lambda path: any(ends([path], name) for name in names)


def _layer(path: str) -> int | None:
    match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
    return int(match[1]) if match else None


def _check_factors(
    field: str, expected: Expected, config: AdapterConfig, found: Found
) -> list[str]:
    """Warnings; AdapterError where a name has no tensors at all, or a layer has some of them."""
    layers = {_layer(path) for path in found.modules}
    lost: dict[str, None] = {}
    for name, there in expected.items():
        missing = [key for key, is_there in there.items() if not is_there]
        torn = field == "target_parameters" and any(_layer(key) in layers for key in missing)
        nothing = len(missing) == len(there) and not ends(found.names, name)
        if missing and (torn or nothing) and _is_exact(config):
            raise _incomplete(field, name, missing)
        lost.update(dict.fromkeys(missing))
    if not lost:
        return []
    gone = sorted({n for n in map(_layer, lost) if n is not None} - layers)
    note = f"; layers {', '.join(map(str, gone))} have none at all" if gone else ""
    return [
        f"adapter_config.json: {field} names {len(lost)} modules of the model without factors in "
        f"the file, which stay unchanged: {', '.join(list(lost)[:3])}"
        f"{', ...' if len(lost) > 3 else ''}{note}"
    ]


def _is_exact(config: AdapterConfig) -> bool:
    """Whether PEFT wrote the config, which then names no more than was saved."""
    return config.names_version or is_pefts_own(config.fields)
