"""Logits equal transformers eager, sequences one by one, whatever the chunks and the company."""

import pytest
import torch
from helpers_models import (
    Driver,
    random_sequences,
    reference_logits,
    relative_error,
    served,
    tiny_model,
    worst_error,
)

from vexpert.models.masks import MaskKind

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
DENSE = ("llama", "qwen3", "gemma2")
LIMIT = 1e-5


@pytest.mark.parametrize("model_type", MOE + DENSE)
def test_exact(model_type: str) -> None:
    assert worst_error(tiny_model(model_type)) < LIMIT


# sinks and window; softcap and window; chunks; latents, in two forms of rotation
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is not in use")
@pytest.mark.parametrize(
    "model_type", ["gpt_oss", "gemma2", "llama4_text", "deepseek_v2", "deepseek_v3"]
)
def test_exact_with_kernels(model_type: str) -> None:
    error = worst_error(tiny_model(model_type), longest=17, count=3, use_kernels=True)
    assert error < LIMIT


@pytest.mark.skipif(torch.cuda.is_available(), reason="it chooses backends of a CPU")
def test_kernels_come_with_the_triton_backend() -> None:
    for backend, model_type, expected in (
        ("triton", "qwen3", True),
        ("triton", "deepseek_v2", True),  # latent
        ("torch", "qwen3", False),
    ):
        layers = served(tiny_model(model_type), lora_backend=backend).layers
        assert {layer.use_kernels for layer in layers} == {expected}


@pytest.mark.parametrize("use_kernels", [False, True])
def test_a_wrong_window_is_seen(use_kernels: bool) -> None:
    """Contexts are longer than the windows: a layer with a window one too long must fail."""
    if use_kernels and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is not in use")
    model = tiny_model("mixtral")
    sequences = random_sequences(1, 16, 1)
    want = reference_logits(model, sequences)
    ours = served(model)
    for layer in ours.layers:
        layer.use_kernels = use_kernels
    ours.layers[1].kind = MaskKind(window=8)
    got = Driver(ours).play(sequences)
    assert relative_error(torch.cat(got), torch.cat(want)) > 100 * LIMIT


def test_wanted_rows_only_in_float32() -> None:
    model = tiny_model("granitemoe")
    ids = random_sequences(1, 9, 2)[0]
    (want,) = reference_logits(model, [ids])
    driver = Driver(served(model.to(torch.bfloat16)))
    step = driver.whole_step(ids, [8, 2])
    logits = driver.model.forward(step)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 61)
    assert relative_error(logits, want[[8, 2]]) < 0.1


def test_large_query_parts_of_the_explicit_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks and score caps run in parts of query rows; small parts must give the same."""
    monkeypatch.setattr("vexpert.models.attention.SCORES_AT_ONCE", 500)
    assert worst_error(tiny_model("gpt_oss")) < LIMIT
