"""Adapters trained on transformers 4, whose experts were modules of their own: all 16 right.

PEFT 0.21 on transformers 5 loads six of these kinds right, six silently wrong, and fails on four
(docs/adapters.md). Each is written here from known factors in the format of its time, served by
the engine, and compared with those factors merged into the weights; `cases` are files that PEFT
on transformers 4 wrote itself, which test_cases runs.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_cases import all_cases
from helpers_extras import IDS, Files, ask, make_llm, make_model
from helpers_formats import applied, log_probs
from helpers_writers import (
    NAMES,
    PREFIX,
    W_NAMES,
    Tensors,
    fused_keys,
    linear_keys,
    per_expert_keys,
)

from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsMagnitude,
    ExpertsTarget,
    Factors,
)

ALPHA = 3.0
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = ("gate", "up", "down")


@dataclass(frozen=True)
class Kind:
    """One way to train, and the cases of ../shared/cases that PEFT itself wrote that way."""

    model: str
    linear: tuple[str, ...] = MLP  # names of the Linear modules adapted
    projections: tuple[str, ...] = EVERY
    gate_rank: int = 2
    rslora: bool = False
    dora: bool = False
    fused: bool = False
    names: tuple[tuple[str, str], ...] = tuple(NAMES.items())
    rename: tuple[str, str] = ("", "")
    config: tuple[tuple[str, Any], ...] = ()
    cases: tuple[str, ...] = ()


KINDS = {
    "mixtral": Kind(
        "mixtral",
        linear=("q_proj",),
        names=tuple(W_NAMES.items()),
        rename=(".mlp.", ".block_sparse_moe."),
        cases=("26", "48", "49", "54"),
    ),
    "olmoe": Kind("olmoe"),
    "qwen3_moe": Kind("qwen3_moe", linear=("q_proj", *MLP)),
    "qwen3_moe, all-linear": Kind("qwen3_moe", (*ATTENTION, "gate", *MLP), cases=("31",)),
    "qwen3_moe, router": Kind("qwen3_moe", ("gate", "q_proj"), projections=(), cases=("38",)),
    "gpt_oss": Kind(
        "gpt_oss", ("v_proj",), fused=True, config=(("peft_version", "0.18.1"),), cases=("18",)
    ),
    "deepseek_v3": Kind("deepseek_v3", linear=("kv_b_proj", *MLP), cases=("27",)),
    "glm4_moe": Kind("glm4_moe", linear=("o_proj", *MLP), cases=("28",)),
    "dots1": Kind("dots1", linear=("o_proj", *MLP), cases=("29",)),
    "ernie4_5_moe": Kind("ernie4_5_moe", linear=("o_proj", *MLP)),
    "qwen2_moe": Kind("qwen2_moe", (*ATTENTION, "gate", "shared_expert_gate", *MLP), cases=("32",)),
    "rsLoRA on experts": Kind("qwen3_moe", rslora=True, gate_rank=4, cases=("43",)),
    "llama4": Kind("llama4_text", ATTENTION, fused=True, config=(("peft_version", "0.18.1"),)),
    "DoRA on experts": Kind("qwen3_moe", linear=(), dora=True, cases=("47",)),
    "up_proj only": Kind("qwen3_moe", ("up_proj",), projections=("up",), cases=("25",)),
    "rank_pattern of gate_proj": Kind("qwen3_moe", gate_rank=4),
}


@functools.cache
def model(name: str) -> Any:
    return make_model(name)


class Writer:
    """Known factors of one kind, and the file that stands for them."""

    def __init__(self, files: Files, kind: Kind) -> None:
        self.files = files
        self.kind = kind

    def scale(self, rank: int) -> float:
        return ALPHA / rank**0.5 if self.kind.rslora else ALPHA / rank

    def pair(self, experts: int, rank: int, inputs: int, outputs: int) -> Factors:
        a, b = (0.3 * self.files.draw(experts, *size) for size in ((rank, inputs), (outputs, rank)))
        return Factors(a, b, self.scale(rank))

    def experts(self, target: ExpertsTarget) -> ExpertsFactors:
        found: dict[str, Factors] = {}
        count, hidden, inner = target.num_experts, target.hidden_size, target.intermediate_size
        for name in self.kind.projections:
            rank = self.kind.gate_rank if name == "gate" else 2
            sizes = (inner, hidden) if name == "down" else (hidden, inner)
            found[name] = self.pair(count, rank, *sizes)
        if self.kind.fused:  # one A for gate and up
            up = found["up"]
            found["up"] = Factors(found["gate"].a, up.b, up.scale)
        return ExpertsFactors(**found)

    def weights(self) -> AdapterWeights:
        modules: dict[str, Factors | ExpertsFactors] = {}
        magnitude: dict[str, ExpertsMagnitude] = {}
        for path, target in self.files.targets.targets.items():
            leaf = path.rpartition(".")[2]
            if isinstance(target, ExpertsTarget) and self.kind.projections:
                modules[path] = self.experts(target)
                if self.kind.dora:
                    magnitude[path] = self.magnitude(target)
            elif (
                not isinstance(target, ExpertsTarget | EmbeddingTarget) and leaf in self.kind.linear
            ):
                rank = self.kind.gate_rank if leaf == "gate_proj" else 2
                modules[path] = self.pair(1, rank, target.in_features, target.out_features)
        return AdapterWeights(modules, expert_magnitude=magnitude)

    def magnitude(self, target: ExpertsTarget) -> ExpertsMagnitude:
        count, hidden, inner = target.num_experts, target.hidden_size, target.intermediate_size
        gate, up, down = (1 + self.files.draw(count, n).abs() for n in (inner, inner, hidden))
        return ExpertsMagnitude(gate, up, down)

    def save(self, weights: AdapterWeights) -> Path:
        kind, targets = self.kind, self.files.targets
        tensors: Tensors = linear_keys(weights, targets)
        if kind.projections and kind.fused:
            tensors |= fused_keys(weights, targets)
        elif kind.projections:
            tensors |= per_expert_keys(weights, targets, dict(kind.names), kind.rename)
        for path, found in weights.expert_magnitude.items():
            for name in EVERY:
                for expert, value in enumerate(getattr(found, name)):
                    key = f"{PREFIX}{path}.{expert}.{NAMES[name]}.lora_magnitude_vector.weight"
                    tensors[key] = value
        pattern = {"rank_pattern": {"gate_proj": kind.gate_rank}} if kind.gate_rank != 2 else {}
        flags = {"use_rslora": kind.rslora, "use_dora": kind.dora}
        return self.files.save("adapter", tensors, **flags, **pattern, **dict(kind.config))


def test_there_are_sixteen() -> None:
    assert len(KINDS) == 16


@pytest.mark.parametrize("name", KINDS)
def test_right(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    files = Files(model(kind.model), tmp_path)
    writer = Writer(files, kind)
    weights = writer.weights()
    with applied(files.model, weights) as merged:
        wanted = log_probs(merged, IDS)
    base = log_probs(files.model, IDS)
    assert (wanted - base).abs().max() > 0.05
    llm = make_llm(files.model)
    llm.load_adapter("x", str(writer.save(weights)))
    for table, want in zip(ask(llm, [None, "x", None], IDS), (base, wanted, base), strict=True):
        torch.testing.assert_close(table, want, atol=2e-4, rtol=0)


@pytest.mark.skipif(not all_cases(), reason="../shared/cases is not beside the checkout")
def test_the_cases_named_exist() -> None:
    numbers = {case.name[:2]: case for cases in all_cases().values() for case in cases}
    named = [number for kind in KINDS.values() for number in kind.cases]
    assert all("transformers 4" in numbers[n].expected["source"] for n in named)
