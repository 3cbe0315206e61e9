"""`lora_B_layout` reaches the reader from --lora-modules and from the request's field."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from helpers_extras import IDS, Files, make_model, save_model
from helpers_formats import applied, log_probs
from helpers_serve import serve
from helpers_writers import fused_keys, random_adapter

from vexpert.lora.types import AdapterWeights, ExpertsFactors

GROUPED = "grouped_by_expert"


class Served:
    """A server with one adapter whose columns are grouped by expert, loaded so at boot."""

    def __init__(self, root: Path) -> None:
        model = make_model("qwen3_moe")
        self.files = Files(model, root)
        weights = random_adapter(self.files.targets, 2, 0.2, self.files.generator, one_a=True)
        found = weights.modules.items()
        experts = {path: pair for path, pair in found if isinstance(pair, ExpertsFactors)}
        keys = fused_keys(AdapterWeights(experts), self.files.targets, layout=GROUPED)
        self.path = str(self.files.save("grouped", keys, lora_alpha=0.4, peft_version="0.21.2"))
        self.folder = save_model(model, root / "model")
        with applied(model, AdapterWeights(experts)) as merged:
            self.wanted = log_probs(merged, IDS)[-1]
        self.url = ""

    def last(self, name: str) -> torch.Tensor:
        """Log-probs of the five likeliest tokens behind the prompt, by name of the token."""
        body = {"model": name, "prompt": IDS, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).json()
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        found = torch.full((61,), float("nan"))
        for token, value in top.items():
            found[int(token.removeprefix("t"))] = value
        return found

    def assert_right(self, name: str) -> None:
        found = self.last(name)
        known = ~found.isnan()
        assert int(known.sum()) >= 5
        torch.testing.assert_close(found[known], self.wanted[known], atol=2e-4, rtol=0)

    def load(self, name: str, **fields: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": self.path, **fields}
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("layout"))
    module = json.dumps({"name": "boot", "path": one.path, "lora_B_layout": GROUPED})
    options = ("--dtype", "float32", "--device", "cpu", "--lora-modules", module)
    with serve(one.folder, *options) as one.url:
        yield one


def test_from_the_command_line(served: Served) -> None:
    served.assert_right("boot")


def test_from_a_request(served: Served) -> None:
    assert served.load("asked", lora_B_layout=GROUPED).status_code == 200
    served.assert_right("asked")


def test_the_other_order_means_another_adapter(served: Served) -> None:
    assert served.load("other", lora_B_layout="rank_major").status_code == 200
    assert served.load("default").status_code == 200
    with pytest.raises(AssertionError):
        served.assert_right("other")
    torch.testing.assert_close(served.last("default"), served.last("other"), equal_nan=True)


def test_an_order_that_nobody_defined(served: Served) -> None:
    answer = served.load("bad", lora_B_layout="columns")
    assert answer.status_code == 400
    assert "lora_B_layout" in answer.json()["error"]["message"]
