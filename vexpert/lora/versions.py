"""Which PEFT wrote a config, as far as the config shows it."""

import re
from collections.abc import Collection, Set

Version = tuple[int, int, int]

# Fields that LoraConfig got in a release, newest first. PEFT writes every field it knows, so the
# fields show the writer where peft_version is missing (before 0.18, or taken out by an exporter).
FIELDS_SINCE: tuple[tuple[Version, tuple[str, ...]], ...] = (
    ((0, 20, 0), ("monteclora_config", "velora_config", "kasa_config")),
    ((0, 19, 0), ("lora_ga_config", "use_bdlora")),
    ((0, 18, 0), ("alora_invocation_tokens", "arrow_config", "ensure_weight_tying")),
    ((0, 17, 0), ("loftq_config", "megatron_core", "qalora_group_size")),
)

# Where ParamWrapper's lora_A lies has changed twice; an "era" is a span of versions that agree.
ERA_FIRST, ERA_0190, ERA_NOW = "up to 0.18", "0.19.0", "from 0.19.1"


def peft_version(text: str) -> Version | None:
    """(major, minor, patch) of a version string; None when it does not begin like one."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", text)
    if match is None:
        return None
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def era(version: Version) -> str:
    """The era of one version."""
    if version < (0, 19, 0):
        return ERA_FIRST
    return ERA_0190 if version == (0, 19, 0) else ERA_NOW


def possible_eras(version: str | None, fields: Collection[str]) -> tuple[str, ...]:
    """Eras that the config allows: by peft_version, else by which fields it has."""
    known = peft_version(version) if version is not None else None
    if known is not None:
        return (era(known),)
    for since, names in FIELDS_SINCE:
        if any(name in fields for name in names):
            return (ERA_0190, ERA_NOW) if since == (0, 19, 0) else (era(since),)
    return ERA_FIRST, ERA_NOW  # not PEFT's writer: exporters follow either


def is_pefts_own(fields: Collection[str]) -> bool:
    """Whether PEFT itself wrote a config with these fields; exporters write few of them."""
    return any(name in fields for _, names in FIELDS_SINCE for name in names)


# How patterns are matched has changed twice (vexpert.lora.pattern_tables).
PATTERNS_013, PATTERNS_014, PATTERNS_NOW = "up to 0.13", "0.14", "from 0.15"
PATTERN_RULES = (PATTERNS_013, PATTERNS_014, PATTERNS_NOW)  # oldest first
_SINCE_015 = ("corda_config", "trainable_token_indices", "target_parameters", "qalora_group_size")
_SINCE_014 = ("eva_config", "exclude_modules", "lora_bias")
# In all of PEFT's configs, though null as a rule: without them fields were left out, and that one
# is missing shows nothing.
_ALWAYS = frozenset({"auto_mapping", "layers_pattern", "megatron_config", "revision"})


def possible_pattern_rules(version: str | None, fields: Set[str]) -> tuple[str, ...]:
    """Those of PATTERN_RULES that the config allows: by peft_version, else by its fields."""
    known = peft_version(version) if version is not None else None
    if known is not None:
        at = (known >= (0, 14, 0)) + (known >= (0, 15, 0))
        return PATTERN_RULES[at : at + 1]
    newer = (name for since, names in FIELDS_SINCE if since > (0, 17, 0) for name in names)
    if any(name in fields for name in (*newer, *_SINCE_015)):
        return (PATTERNS_NOW,)
    is_older = not any(name in fields for name in _SINCE_014)
    if fields >= _ALWAYS:
        return (PATTERNS_013,) if is_older else (PATTERNS_014,)
    return PATTERN_RULES if is_older else PATTERN_RULES[1:]
