"""What adapter_config.json says, validated. It holds no tensors and decides no format."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.info import SHOWN_NAMES, ListedNames
from vexpert.lora.json_files import read_json
from vexpert.lora.pattern_tables import ORDER, PatternFields
from vexpert.lora.patterns import Patterns
from vexpert.lora.variants import VARIANTS, check_variant
from vexpert.lora.versions import peft_version, possible_pattern_rules

CONFIG_NAME = "adapter_config.json"
LAYOUTS = ("rank_major", "grouped_by_expert")
INPUT_EMBEDDING = ""  # in token_indices: the model's own, whatever its name
MOST_PATTERNS, MOST_LETTERS = 20, 200  # in layers_pattern
DEFAULT_ALPHA = 8.0  # PEFT's, for a config without lora_alpha

# What wraps a model while it trains; such a name says nothing of the model's own class.
_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "PeftM")

# Fields of LoraConfig that do not change what the tensors mean, or that are read below.
KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "enable_lora",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_B_layout",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",
        "modules_to_save",
        ORDER,
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)


@dataclass(frozen=True)
class AdapterConfig:
    """adapter_config.json of one LoRA adapter."""

    r: int | None = None  # None: not stated; the files' shapes count anyway
    alpha: float = DEFAULT_ALPHA
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    ensure_weight_tying: bool = False
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    token_indices: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by end of module path
    layout: str | None = None  # lora_B_layout
    version: str | None = None  # peft_version, or NeMo's paramwrapper_layout
    base_class: str | None = None  # auto_mapping's base_model_class
    unsloth: bool = False  # signs of Unsloth in the config
    fields: frozenset[str] = frozenset()  # names of all fields present: tells the writer
    target_modules: tuple[str, ...] | str = ()  # a str is a regular expression
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()  # empty: all
    layers_pattern: tuple[str, ...] = ()  # what stands before a layer's number; empty: anything
    base_model: str = ""  # base_model_name_or_path
    is_pattern_ordered: bool = False  # pattern_order: the patterns' order is the trainer's
    warnings: tuple[str, ...] = ()

    @property
    def names_version(self) -> bool:
        """Whether the config itself, as PEFT writes it, has peft_version."""
        return self.version is not None and "peft_version" in self.fields

    @cached_property
    def patterns(self) -> Patterns:
        """rank_pattern and alpha_pattern, compiled."""
        fields = PatternFields(
            self.rank_pattern, self.alpha_pattern, self.r, self.alpha, self.is_pattern_ordered
        )
        return Patterns(fields, possible_pattern_rules(self.version, self.fields))

    def scale(self, name: str, rank: int, notes: list[str]) -> float:
        """LoRA's factor for `name`: alpha after alpha_pattern over `rank`, the rank in the file.

        What had to be assumed of the patterns' order is added to `notes`; AdapterError where
        nothing tells it.
        """
        alpha, note = self.patterns.alpha(name, rank)
        notes += [note] if note else []
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(folder: Path) -> AdapterConfig:
    """Read and validate `folder/adapter_config.json`; AdapterError says which field and why."""
    raw = read_json(folder / CONFIG_NAME)
    return parse_config(raw, None if raw.get("peft_version") else _nemo_version(folder))


def parse_config(raw: dict[str, Any], nemo_version: str | None = None) -> AdapterConfig:
    """Validate the fields of an adapter_config.json; AdapterError says which one and why."""
    check_variant(raw)
    warnings = _notes(raw)
    _warn_unknown(raw, warnings)
    config = AdapterConfig(
        r=_rank(raw.get("r"), "r") if raw.get("r") is not None else None,
        alpha=_number(raw.get("lora_alpha", DEFAULT_ALPHA), "lora_alpha"),
        rank_pattern={k: _rank(v, f"rank_pattern[{k!r}]") for k, v in _table(raw, "rank_pattern")},
        alpha_pattern={
            k: _number(v, f"alpha_pattern[{k!r}]") for k, v in _table(raw, "alpha_pattern")
        },
        bias=_choice(raw.get("bias") or "none", "bias", ("none", "all", "lora_only")),
        use_rslora=_flag(raw, "use_rslora"),
        use_dora=_flag(raw, "use_dora"),
        lora_bias=_flag(raw, "lora_bias"),
        ensure_weight_tying=_flag(raw, "ensure_weight_tying"),
        target_modules=_names_or_pattern(raw, "target_modules"),
        exclude_modules=_names_or_pattern(raw, "exclude_modules"),
        layers_to_transform=_layers(raw.get("layers_to_transform")),
        layers_pattern=_layers_pattern(raw),
        base_model=_text(raw.get("base_model_name_or_path")),
        is_pattern_ordered=_is_ordered(raw.get(ORDER)),
        target_parameters=_names(raw, "target_parameters"),
        modules_to_save=_names(raw, "modules_to_save"),
        token_indices=_token_indices(raw.get("trainable_token_indices")),
        layout=_layout(raw.get("lora_B_layout")),
        version=_version(raw.get("peft_version")) or nemo_version,
        base_class=_base_class(raw),
        unsloth=_is_unsloth(raw),
        fields=frozenset(raw),
        warnings=tuple(warnings),
    )
    _ = config.patterns  # a bad pattern is an error now, not when first used
    return config


def check_layout(value: str | None, source: str) -> str | None:
    """`value` if it is a known order of lora_B's columns, or None."""
    if value is not None and value not in LAYOUTS:
        raise AdapterError(
            f"{source}={value!r} is unknown; use one of {', '.join(LAYOUTS)}, as the trainer says"
        )
    return value


def _layout(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _bad("lora_B_layout", value, f"one of {', '.join(LAYOUTS)}")
    return check_layout(value, f"{CONFIG_NAME}: lora_B_layout")


def _notes(raw: dict[str, Any]) -> list[str]:
    """Warnings of what fields say that is likely not meant, or means nothing here."""
    found = []
    if "lora_alpha" not in raw:
        found.append(f"lora_alpha is not in {CONFIG_NAME}: PEFT's default {DEFAULT_ALPHA:g} used")
    elif raw["lora_alpha"] == 0 and not raw.get("alpha_pattern"):
        found.append(f"lora_alpha is 0 in {CONFIG_NAME}: the adapter changes nothing")
    if _flag(raw, "fan_in_fan_out"):
        found.append(
            f"{CONFIG_NAME}: fan_in_fan_out=true is for Conv1D weights, and this model has Linear "
            "ones: without effect, as in PEFT"
        )
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        found.append(
            f"{CONFIG_NAME}: task_type={shown(raw['task_type'])}: trained for another head than a "
            "language model's, whose text may then mean nothing"
        )
    return found


def _warn_unknown(raw: dict[str, Any], warnings: list[str]) -> None:
    """Refuse unknown fields that may change the meaning, warn of the others; null is no field."""
    unknown = [k for k, v in raw.items() if k not in KNOWN and k not in VARIANTS and v]
    names = sorted(k if k.isprintable() and len(k) <= 100 else shown(k) for k in unknown)
    risky = [k for k in unknown if k.startswith("use_") or k.endswith("_config")]
    if risky:
        facts = ", ".join(f"{shown(k)}={shown(raw[k])}" for k in risky[:5])
        raise AdapterError(
            f"{CONFIG_NAME}: {facts}: a variant of LoRA that this version does not know; merge the "
            "adapter into the base model"
        )
    if unknown:
        told = ListedNames(names[:SHOWN_NAMES], len(names) - SHOWN_NAMES)
        warnings.append(f"{CONFIG_NAME}: unknown fields ignored: {told}")


def _bad(name: str, value: Any, wanted: str) -> AdapterError:
    return AdapterError(f"{CONFIG_NAME}: {name}={shown(value)}: must be {wanted}")


def _rank(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(name, value, "an integer of at least 1")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _bad(name, value, "finite")
    return number


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return bool(value)


def _choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise _bad(name, value, f"one of {', '.join(choices)}")
    return str(value)


def _table(raw: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    value = raw.get(name)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise _bad(name, value, "an object")
    return list(value.items())


def _names(raw: dict[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _bad(name, value, "a list of names")
    return tuple(value)


def _names_or_pattern(raw: dict[str, Any], name: str) -> tuple[str, ...] | str:
    value = raw.get(name)
    return value if isinstance(value, str) else _names(raw, name)


def _layers_pattern(raw: dict[str, Any]) -> tuple[str, ...]:
    """Each is tried on every module of the model, so they are few and short."""
    value = _names_or_pattern(raw, "layers_pattern")
    found = value if isinstance(value, tuple) else (value,) if value else ()
    if len(found) > MOST_PATTERNS or any(len(item) > MOST_LETTERS for item in found):
        raise _bad(
            "layers_pattern",
            value,
            f"at most {MOST_PATTERNS} names of at most {MOST_LETTERS} characters",
        )
    return found


def _layers(value: Any) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise _bad("layers_to_transform", value, "a layer's number, or a list of them")
    return tuple(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_ordered(value: Any) -> bool:
    if value not in (None, "trainer"):
        raise _bad(ORDER, value, '"trainer": the order of the patterns is the trainer\'s')
    return value is not None


def _token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    """PEFT's trainable_token_indices; a bare list means the input embedding. Empty lists: none."""
    name = "trainable_token_indices"
    if value is None:
        return {}
    table = value if isinstance(value, dict) else {INPUT_EMBEDDING: value}
    for indices in table.values():
        if not isinstance(indices, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) for i in indices
        ):
            raise _bad(name, value, "a list of token ids, or one for each module")
        if len(set(indices)) != len(indices):
            raise _bad(name, value, "free of repeated token ids")
    return {module: tuple(indices) for module, indices in table.items() if indices}


def _version(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or peft_version(value) is None:
        raise _bad("peft_version", value, 'a version such as "0.21.2"')
    return value


def _nemo_version(folder: Path) -> str | None:
    """PEFT version whose layout NeMo AutoModel says it wrote, in a file of its own."""
    path = folder / "automodel_peft_config.json"
    layout = read_json(path).get("paramwrapper_layout") if path.exists() else None
    if layout is None:
        return None
    if not isinstance(layout, str) or peft_version(layout.removeprefix("peft-")) is None:
        raise AdapterError(
            f'{path}: paramwrapper_layout={shown(layout)}: must be like "peft-0.19.1"'
        )
    return layout.removeprefix("peft-")


def _base_class(raw: dict[str, Any]) -> str | None:
    mapping = raw.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if not isinstance(name, str) or name.startswith(_WRAPPERS):
        return None
    return name.removeprefix("FSDP")


def _is_unsloth(raw: dict[str, Any]) -> bool:
    mapping = raw.get("auto_mapping")
    marked = isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed"))
    return marked or "unsloth" in str(raw.get("base_model_name_or_path", "")).lower()
