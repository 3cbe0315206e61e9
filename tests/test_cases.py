"""Files of real trainers through the real engine: right, or refused with the reason.

All adapters of a model and base rows between them run as one batch, then each alone.
"""

import functools

import pytest
import torch
from helpers_cases import Case, Loaded, all_cases, ask, load_cases

from vexpert.errors import AdapterNotFoundError

TOLERANCE = 2e-4
MODELS = sorted(all_cases())
COUNT = 97
pytestmark = pytest.mark.skipif(not MODELS, reason="../shared/cases is not beside the checkout")


@functools.lru_cache(maxsize=1)  # tests of one model follow each other
def loaded(model: str) -> Loaded:
    return load_cases(model)


def pairs(cases: list[Case]) -> list[tuple[Case, str | None]]:
    """Each case with its adapter, a base row after it where the base can run the prompt."""
    found: list[tuple[Case, str | None]] = []
    for case in cases:
        found.append((case, case.name))
        if case.expected["base_top"] is not None:
            found.append((case, None))
    return found


def wanted(case: Case, name: str | None) -> torch.Tensor:
    return torch.tensor(case.expected["base_top" if name is None else "top"])


def check(cases: list[tuple[Case, str | None]], tables: list[torch.Tensor]) -> None:
    wrong = {}
    for (case, name), table in zip(cases, tables, strict=True):
        want = wanted(case, name)
        assert table.shape == want.shape, case.name
        difference = float((table - want).abs().max())
        if not difference <= TOLERANCE:
            wrong[case.name, name] = difference
    assert not wrong


def test_all_cases_are_there() -> None:
    assert sum(len(cases) for cases in all_cases().values()) >= COUNT


@pytest.mark.parametrize("model", MODELS)
def test_verdicts(model: str) -> None:
    done = loaded(model)
    verdicts = {case.name: case.expected["verdict"] for case in all_cases()[model]}
    assert not [name for name in done.refused if verdicts[name] == "load"], done.refused
    assert not [case.name for case in done.accepted if verdicts[case.name] == "refuse"]


@pytest.mark.parametrize("model", MODELS)
def test_one_batch(model: str) -> None:
    done = loaded(model)
    cases = pairs(done.accepted)
    check(cases, ask(done.llm, cases))


@pytest.mark.parametrize("model", MODELS)
def test_each_alone(model: str) -> None:
    done = loaded(model)
    for case in done.accepted:
        check([(case, case.name)], ask(done.llm, [(case, case.name)]))


@pytest.mark.parametrize("model", MODELS)
def test_refused_adapters_leave_nothing(model: str) -> None:
    done = loaded(model)
    assert {info.name for info in done.llm.adapters()} == {case.name for case in done.accepted}
    for name in done.refused:
        with pytest.raises(AdapterNotFoundError, match=name):
            done.llm.generate({"prompt_token_ids": [5, 6]}, adapter=name)
    done.llm.engine.check_integrity()
    case = all_cases()[model][0]
    check([(case, None)], ask(done.llm, [(case, None)]))
