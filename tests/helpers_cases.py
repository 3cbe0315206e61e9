"""Adapter cases: folders with expected log-probabilities, run through a real engine."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers_formats import CASES

from vexpert import LLM, SamplingParams
from vexpert.engine.outputs import RequestOutput
from vexpert.errors import AdapterError

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)


@dataclass(frozen=True)
class Case:
    """One folder of ../shared/cases."""

    name: str
    folder: Path
    expected: dict[str, Any]

    @property
    def prompt(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": self.expected["prompt_token_ids"]}


@functools.cache
def all_cases() -> dict[str, list[Case]]:
    """Cases by model; empty where the folder is not beside the checkout."""
    found: dict[str, list[Case]] = {}
    for folder in sorted((CASES / "cases").glob("*")) if CASES.is_dir() else []:
        expected = json.loads((folder / "expected.json").read_text())
        found.setdefault(expected["model"], []).append(Case(folder.name, folder, expected))
    return found


def log_prob_table(output: RequestOutput) -> torch.Tensor:
    """[prompt tokens, V]: the log-probabilities after each token of the prompt."""
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    table = []
    for row in rows:
        assert row is not None
        table.append([row[token].logprob for token in sorted(row)])
    return torch.tensor(table)


@dataclass
class Loaded:
    """An engine with every case of one model that it accepted."""

    llm: LLM
    accepted: list[Case]
    refused: dict[str, str]  # reason by name


def load_cases(model: str) -> Loaded:
    """Load each case's adapter under the case's name."""
    cases = all_cases()[model]
    llm = LLM(str(CASES / "models" / model), dtype="float32", device="cpu", max_loras=len(cases))
    loaded = Loaded(llm, [], {})
    for case in cases:
        options = case.expected.get("options") or {}
        try:
            llm.load_adapter(case.name, str(case.folder / "adapter"), **options)
        except AdapterError as error:
            loaded.refused[case.name] = str(error)
        else:
            loaded.accepted.append(case)
    return loaded


def ask(llm: LLM, cases: list[tuple[Case, str | None]]) -> list[torch.Tensor]:
    """Tables of (case, adapter) pairs, all in one batch."""
    outputs = llm.generate(
        [case.prompt for case, _ in cases], ONE_TOKEN, adapter=[name for _, name in cases]
    )
    return [log_prob_table(output) for output in outputs]
