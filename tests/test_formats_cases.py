"""Adapter files of real trainers: read as expected, in numbers, or refused."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers_formats import CASES, applied, load_model, log_probs, target_map

from vexpert.errors import AdapterError
from vexpert.lora.extras import EXTRAS
from vexpert.lora.reader import read_adapter

FOLDERS = sorted((CASES / "cases").glob("*")) if CASES.is_dir() else []
pytestmark = pytest.mark.skipif(not FOLDERS, reason="../shared/cases is not beside the checkout")


@functools.cache
def model_and_map(name: str):
    model = load_model(name)
    return model, target_map(model)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_case(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    model, targets = model_and_map(expected["model"])
    parameters = dict(model.named_parameters())

    def read():
        return read_adapter(
            folder / "adapter",
            targets,
            supported=frozenset(EXTRAS),
            base_weight=parameters.get,
            **(expected.get("options") or {}),
        )

    if expected["verdict"] == "refuse":
        with pytest.raises(AdapterError):
            read()
        return
    try:
        weights = read()
    except AdapterError:
        if expected["verdict"] == "either":
            return
        raise
    with applied(model, weights) as merged:
        found = log_probs(merged, expected["prompt_token_ids"])
    torch.testing.assert_close(found, torch.tensor(expected["top"]), atol=2e-4, rtol=0)
