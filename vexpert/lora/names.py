"""Names of modules in adapter files -> the model's own paths (transformers >= 5 names)."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from vexpert.lora.types import ExpertsTarget, TargetMap

# In front of "layers.0..." and the like; longest first. A vision tower has other prefixes.
_TEXT_PREFIXES = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "backbone.",
)

# Module names of transformers 4 that transformers 5 changed, by model type: (old, new), in order.
_MIXTRAL = ((".block_sparse_moe.", ".mlp."),)
_GRANITE = ((".router.layer.", ".router."),)
_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "phimoe": (*_MIXTRAL, (".mlp.gate.", ".mlp.router.")),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "hunyuan_v1_moe": ((".gate.wg.", ".gate."),),
    "ernie4_5_moe": ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
}
# Tinker's own names, for every model.
_TINKER = ((".attn.", ".self_attn."), (".unembed_tokens.", ".lm_head."))
# Modules of their own in transformers 4 that are parameters of the experts in transformers 5.
_PARALLEL_EXPERTS = {".input_linear": "gate_up", ".output_linear": "down"}

# Behind "experts.": of expert 3 "3.gate_proj", of all experts "gate_proj"; Unsloth's 4-bit gpt-oss
# has "gate_up_projs.3".
_PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_up_proj": "gate_up",
    "gate_up_projs": "gate_up",
    "down_projs": "down",
}


class Place(NamedTuple):
    """Where a module of the file lies in the model. For experts: which projection of which one."""

    path: str  # of a target, or of another module with parameters
    projection: str = ""  # gate, up, down, gate_up; outer, inner: PEFT's nested wrappers
    expert: int | None = None  # None: all experts together


# Of the model that was asked for last: adapters of one model have thousands of names in common.
_last: tuple[TargetMap, dict[str, Place | None]] | None = None
MOST_NAMES = 1 << 16


def _known_places(targets: TargetMap) -> dict[str, Place | None]:
    """What names have been found to mean; for the caller to fill."""
    global _last
    last = _last
    if last is None or last[0] is not targets or len(last[1]) > MOST_NAMES:
        _last = last = (targets, {})
    return last[1]


class Names:
    """Finds the model's module for a name in a file. Every name is looked up once."""

    def __init__(self, targets: TargetMap) -> None:
        self._targets = targets.targets
        self._renames = _RENAMES.get(targets.model_type, ())
        self._paths = {tail(path): path for path in _module_paths(targets)}
        self._paths.update({path: path for path in _module_paths(targets)})
        self._found: dict[str, str | None] = {}
        self._places = _known_places(targets)

    def find(self, module: str) -> Place | None:
        """The place of `module`, or None: the model has no such module."""
        if module not in self._places:
            self._places[module] = self._find(module)
        return self._places[module]

    def _find(self, module: str) -> Place | None:
        head, found, rest = module.rpartition(".experts.")
        if found:  # asked first: most keys of a file are of single experts
            experts = self._path(f"{head}.experts")
            target = self._targets.get(experts or "")
            if isinstance(target, ExpertsTarget):
                return _expert(target, rest)
        path = self._path(module)
        return self._whole(path) if path is not None else self._parallel(module)

    def _whole(self, path: str) -> Place:
        is_experts = isinstance(self._targets.get(path), ExpertsTarget)
        return Place(path, "outer" if is_experts else "")

    def _parallel(self, module: str) -> Place | None:
        for suffix, projection in _PARALLEL_EXPERTS.items():
            if module.endswith(suffix):
                path = self._path(module.removesuffix(suffix) + ".experts")
                if path is not None and isinstance(self._targets.get(path), ExpertsTarget):
                    return Place(path, projection)
        return None

    def _path(self, module: str) -> str | None:
        """Path of a module of the model, by its own name or an older one."""
        if module not in self._found:
            self._found[module] = self._search(module)
        return self._found[module]

    def _search(self, module: str) -> str | None:
        end = tail(module)
        path = self._paths.get(module) or self._paths.get(end)
        if path is not None:
            return path
        dotted = f".{end}."
        for old, new in (*self._renames, *_TINKER):
            dotted = dotted.replace(old, new)
        return self._paths.get(dotted[1:-1])


def _expert(target: ExpertsTarget, rest: str) -> Place | None:
    """The place of what stands behind "experts."."""
    if rest == "base_layer":
        return Place(target.path, "inner")
    name, number = _split(rest)
    projection = _PROJECTIONS.get(name)
    if projection is None or (number is not None and number >= target.num_experts):
        return None
    if projection == "gate" and not target.has_gate:
        return None
    return Place(target.path, projection, number)


@functools.lru_cache(maxsize=4096)
def _split(rest: str) -> tuple[str, int | None]:
    """("gate_proj", 3) of "3.gate_proj"; ("gate_up_projs", 3) of "gate_up_projs.3"."""
    first, found, second = rest.partition(".")
    if not found:
        return ("" if first.endswith("projs") else first), None
    if first.endswith("projs") and _is_index(second):
        return first, int(second)
    if _is_index(first) and not second.startswith("gate_up") and not second.endswith("projs"):
        return second, int(first)
    return "", None


def _is_index(word: str) -> bool:
    """Whether a model may number a module so: "00" is none of it, nor a number in other digits."""
    return word.isascii() and word.isdigit() and len(word) < 7 and word in ("0", word.lstrip("0"))


def names_of(path: str, model_type: str) -> tuple[str, ...]:
    """`path`, and what transformers 4 called that module, if otherwise."""
    older = f".{path}."
    for old, new in reversed(_RENAMES.get(model_type, ())):
        older = older.replace(new, old)
    return tuple(dict.fromkeys((path, older[1:-1])))


def tail(path: str) -> str:
    """`path` without what stands before the language model's own modules."""
    for prefix in _TEXT_PREFIXES:
        if path.startswith(prefix):
            return path[len(prefix) :]
    return path


def _module_paths(targets: TargetMap) -> Iterable[str]:
    yield from targets.targets
    for name in targets.parameters:
        yield name.rpartition(".")[0]


def layer_of(path: str) -> int | None:
    """The number of the layer that a module of the model lies in."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
    return int(match[1]) if match else None
