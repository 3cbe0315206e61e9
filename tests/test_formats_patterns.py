"""rank_pattern and alpha_pattern: the trainer's order, PEFT's names of parameters, bounded time."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
import regex
import torch
from helpers_writers import (
    fused_keys,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)

from vexpert.errors import AdapterError
from vexpert.lora.json_files import parse_json
from vexpert.lora.matchers import Clock, Matcher
from vexpert.lora.memory_source import adapter_tensors
from vexpert.lora.reader import read_adapter

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 4, 1.0, torch.Generator().manual_seed(0), one_a=True)
LINEAR = linear_keys(WANTED, TARGETS)
V = "model.layers.0.self_attn.v_proj"
EXPERTS = "model.layers.0.mlp.experts"


def scale(folder: Path, module: str, *, experts: bool = False, **config) -> float:
    keys = fused_keys(WANTED, TARGETS) if experts else LINEAR
    keys = {key: x for key, x in keys.items() if f"{module}." in key}
    found = read_adapter(save(folder, keys, **config), TARGETS).modules[module]
    return found.up.scale if experts else found.scale


SLOW = r"(?:\w|[a-z.0]|.)*[89]"  # tries all ways to read a name: exponential
OVERLAP = {r"layers\.0\..*": 2, "v_proj": 20}
WITH_RANKS = dict.fromkeys(OVERLAP, 3)


def test_a_sorted_overlap_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(AdapterError, match=r"'v_proj': 20 for.*v_proj.*pattern_order"):
        scale(tmp_path, V, alpha_pattern=OVERLAP)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"alpha_pattern": OVERLAP, "pattern_order": "trainer"}, 2 / 4),
        ({"alpha_pattern": dict(reversed(OVERLAP.items()))}, 20 / 4),  # not sorted: as written
        ({"alpha_pattern": dict.fromkeys(OVERLAP, 12)}, 12 / 4),  # one value: no doubt
        ({"alpha_pattern": OVERLAP, "rank_pattern": {**WITH_RANKS, "v_proj": 4}}, 20 / 4),
        ({"alpha_pattern": OVERLAP, "rank_pattern": {**WITH_RANKS, r"layers\.0\..*": 4}}, 2 / 4),
    ],
)
def test_what_tells_the_order(tmp_path, config, wanted):
    assert scale(tmp_path, V, **config) == wanted


def test_an_order_that_ranks_do_not_tell(tmp_path):
    with pytest.raises(AdapterError, match="pattern_order"):
        scale(tmp_path, V, alpha_pattern=OVERLAP, rank_pattern=dict.fromkeys(OVERLAP, 4))


def test_pefts_own_pattern_is_the_last(tmp_path):
    """PEFT adds it when it converts gate and up; one pattern of the user's makes an overlap."""
    patterns = {
        "rank_pattern": {r".*\.gate_up_proj": 4},
        "alpha_pattern": {r".*\.gate_up_proj": 10, r".*experts\..*": 20},
    }
    found = scale(tmp_path, EXPERTS, experts=True, r=2, lora_alpha=5, **patterns)
    assert found == 20 / 4
    with pytest.raises(AdapterError, match="pattern_order"):  # not PEFT's: alpha is not doubled
        scale(tmp_path, EXPERTS, experts=True, r=2, lora_alpha=7, **patterns)


def test_a_live_config_keeps_its_order():
    class Config:
        def to_dict(self):
            return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": OVERLAP}

    keys = {key: x for key, x in LINEAR.items() if V in key}
    found = read_adapter(adapter_tensors(keys, Config()), TARGETS)
    assert found.modules[V].scale == 2 / 4


GATE = "model.layers.0.mlp.gate"


@pytest.mark.parametrize(
    ("target", "pattern", "wanted"),
    [
        ("mlp.gate.weight", "mlp.gate.weight", 20 / 4),
        ("gate.weight", "gate", 8 / 4),  # PEFT matches the parameter's name, so this misses
        (None, "gate", 20 / 4),  # a Linear: transformers 4
    ],
)
def test_a_router_named_as_a_parameter(tmp_path, target, pattern, wanted):
    parameters = [] if target is None else [target]
    found = scale(tmp_path, GATE, alpha_pattern={pattern: 20}, target_parameters=parameters)
    assert found == wanted


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize("pattern", [SLOW, r"([a-z._0-9]+)+!", r"(x+x+)+y"])
def test_exponential_patterns_end(tmp_path, monkeypatch, field, pattern):
    monkeypatch.setattr("vexpert.lora.patterns.Clock", lambda: Clock(0.2))
    start = time.monotonic()
    with contextlib.suppress(AdapterError):
        scale(tmp_path, V, **{field: {pattern: 3}})
    assert time.monotonic() - start < 60  # years where nothing ends it


def test_too_slow_is_refused():
    clock = Clock(0.1)
    for _ in range(2):  # then no time is left at all
        with pytest.raises(AdapterError, match=r"f=.*bounded time: on model.layers.0"):
            Matcher("f", SLOW, SLOW, clock).matches(V)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_exponential_module_patterns_end(tmp_path, monkeypatch, field):
    monkeypatch.setattr("vexpert.lora.selection.SECONDS", 0.1)
    keys = {key: x for key, x in LINEAR.items() if V in key}
    config = {"target_modules": ["v_proj"], field: SLOW}
    found = read_adapter(save(tmp_path, keys, **config), TARGETS)
    assert "not checked" in " ".join(found.warnings)


@pytest.mark.parametrize("pattern", ["v_proj{e<=3}", "[[:alpha:]]+", "v_pro[[]j*", "x" * 6000])
def test_patterns_that_could_mean_something_else(tmp_path, pattern):
    with pytest.raises(AdapterError, match="alpha_pattern"):
        scale(tmp_path, V, alpha_pattern={pattern: 3})


USED = [
    "q_proj",
    "layers.0.self_attn.q_proj",
    "selfxattn.v_proj",
    "self.attn.v_proj",
    "proj",
    "v.proj",
    "gate.",
    "",
    r".*\.gate_up_proj",
    r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj",
    r"^layers\.(0|1)\..*",
    r".*layers\.[0-3]\.mlp\.(?!gate).*",
    r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|down_proj).*?)",
    r"experts\.([0-9]{1,3})\.(gate|up)_proj",
    r"(?i:SELF_ATTN\..*)",
    r"(.)\1.*",
    r"(?<=mlp)\.gate",
    r"a|b|v_proj",
    r"(?P<n>layers)\.0\..*",
]


@pytest.mark.parametrize("pattern", USED)
def test_the_matcher_agrees_with_re(pattern):
    expression = rf"(.*\.)?({pattern})$"
    matcher = Matcher("f", pattern, expression, Clock())
    names = [*TARGETS.targets, f"{EXPERTS}.12.up_proj", f"{EXPERTS}.gate_up_proj", "xx.b", "layers"]
    for name in names:
        assert matcher.matches(name) == (re.match(expression, name) is not None), name
        assert bool(regex.match(expression, name)) == bool(re.match(expression, name))


@pytest.mark.parametrize("value", ["file", 1, True, []])
def test_a_bad_order(tmp_path, value):
    with pytest.raises(AdapterError, match="pattern_order"):
        scale(tmp_path, V, pattern_order=value)


def test_a_rank_of_another_number_of_experts(tmp_path):
    """Rank 4 of 3 experts has the rows of rank 2 of 6; a config of PEFT's rules that out."""
    keys = {key: x for key, x in fused_keys(WANTED, TARGETS).items() if EXPERTS in key}
    config = {"r": 6, "lora_alpha": 8}  # 4 x 3 rows are 6 x 2 too
    with pytest.raises(AdapterError, match="rank 6, which fits 2 experts"):
        read_adapter(save(tmp_path, keys, peft_version="0.21.2", **config), TARGETS)
    assert read_adapter(save(tmp_path, keys, **config), TARGETS).modules  # exporters: a warning
    patterns = {"rank_pattern": {"experts.*": 4}, "peft_version": "0.21.2"}
    assert read_adapter(save(tmp_path, keys, **config, **patterns), TARGETS).modules


def test_a_key_twice(tmp_path):
    text = json.dumps({"peft_type": "LORA", "r": 4})[:-1] + ', "lora_alpha": 8, "lora_alpha": 9}'
    save(tmp_path, LINEAR)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match="'lora_alpha' is there twice"):
        read_adapter(tmp_path, TARGETS)


def test_patterns_that_match_nothing_are_told(tmp_path):
    """In either order of the file, and not those that another one only stands before."""
    keys = {key: x for key, x in LINEAR.items() if "v_proj" in key}
    for names in (["layers.*", "v_porj", "v_proj"], ["v_proj", "v_porj", "layers.*"]):
        table = dict.fromkeys(names, 4)
        found = read_adapter(save(tmp_path, keys, alpha_pattern=table, rank_pattern=table), TARGETS)
        told = [text for text in found.warnings if "without effect" in text]
        assert [text.split(": ")[1] for text in told] == ["rank_pattern", "alpha_pattern"]
        assert all("'v_porj'" in text and "'v_proj'" not in text for text in told)
        assert all("layers" not in text for text in told)


def test_a_key_twice_among_many_is_found_fast():
    text = json.dumps({f"k{n}": n for n in range(50_000)})[:-1] + ', "k49999": 0}'
    start = time.monotonic()
    with pytest.raises(ValueError, match="'k49999' is there twice"):
        parse_json(text)
    assert time.monotonic() - start < 20  # seconds; a search for each key takes 40


@pytest.mark.parametrize("patterns", [["x"] * 21, "x" * 201, ["layers", "x" * 201]])
def test_too_many_or_long_layers_patterns(tmp_path, patterns):
    with pytest.raises(AdapterError, match=r"layers_pattern=.* at most 20 names of at most 200"):
        scale(tmp_path, V, layers_to_transform=[0], layers_pattern=patterns)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"alpha_pattern": {"q_proj": 0, "v_proj": 0}}, "q_proj"),
        ({"alpha_pattern": {"q_proj": 0.0}}, "q_proj"),
        ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 4}}, "up_proj"),
        ({"lora_alpha": 0, "alpha_pattern": {"q_proj": 4, ".*": 2}}, ""),
        ({"alpha_pattern": {"q_proj": 4}}, ""),
    ],
)
def test_modules_whose_alpha_is_zero(tmp_path, fields, told):
    wanted = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
    keys = {**linear_keys(wanted, TARGETS), **per_expert_keys(wanted, TARGETS)}
    keys = {k: x for k, x in keys.items() if any(f"{n}_proj" in k for n in ("q", "v", "up"))}
    folder = save(tmp_path, keys, r=2, **{"lora_alpha": 8, **fields})
    found = [text for text in read_adapter(folder, TARGETS).warnings if "an alpha of 0" in text]
    assert len(found) == bool(told)
    assert all(told in text and text.endswith("change nothing") for text in found)
