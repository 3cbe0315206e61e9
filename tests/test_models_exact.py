"""Logits equal transformers eager, sequences one by one, whatever the chunks and the company."""

import pytest
from helpers_models import tiny_model, worst_error

MOE = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "granitemoe",
    "dots1",
    "phimoe",
    "llama4_text",
)
DENSE = ("llama", "qwen3")
LIMIT = 1e-5


@pytest.mark.parametrize("model_type", MOE + DENSE)
def test_exact(model_type: str) -> None:
    assert worst_error(tiny_model(model_type)) < LIMIT
