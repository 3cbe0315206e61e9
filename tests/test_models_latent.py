"""Latent attention in the absorbed form: every shape of it, and what is refused at load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_extras import Files, make_llm, make_model
from helpers_models import (
    Driver,
    random_sequences,
    reference_logits,
    relative_error,
    served,
    tiny_model,
    worst_error,
)
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from vexpert import SamplingParams
from vexpert.errors import ModelError
from vexpert.kernels.dense_factors import HeadColumns
from vexpert.lora.layers import LatentLinear
from vexpert.lora.site_extras import SiteExtra
from vexpert.models.attention import AttentionLayer
from vexpert.models.latent import find_columns

LIMIT = 1e-5
SHAPES: dict[str, dict[str, Any]] = {
    "queries not compressed": {"q_lora_rank": None},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "odd sizes": {"qk_nope_head_dim": 5, "v_head_dim": 7, "kv_lora_rank": 9, "qk_rope_head_dim": 6},
    "values wider than keys": {"v_head_dim": 33},
    "rotation by halves": {"rope_interleave": False},
}
KNOWN = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")


LATENT = [name for name in KNOWN if name in CONFIG_MAPPING_NAMES]  # of this transformers


@pytest.mark.parametrize("use_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact(shape: str, use_kernels: bool) -> None:
    if use_kernels and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is not in use")
    options = {"longest": 15, "count": 3} if use_kernels else {}
    model = tiny_model("deepseek_v3", **SHAPES[shape])
    assert worst_error(model, use_kernels=use_kernels, **options) < LIMIT


@pytest.mark.parametrize("model_type", LATENT)
def test_no_context_is_expanded(model_type: str) -> None:
    """kv_b_proj itself is never called, and every layer keeps latents alone."""
    model = tiny_model(model_type)
    sequences = random_sequences(3, 21, 4)
    want = reference_logits(model, sequences)
    ours = served(model)
    called: list[str] = []
    for path, module in model.named_modules():
        if path.endswith("kv_b_proj"):
            module.register_forward_hook(lambda *_, name=path: called.append(name))
    got = Driver(ours).play(sequences)
    assert relative_error(torch.cat(got), torch.cat(want)) < LIMIT
    assert not called
    for layer in ours.layers:
        assert layer.latent is not None
        assert layer.elements_per_token == sum(part.shape[2] for part in (layer.keys, layer.values))
        assert layer.keys.shape[1] == layer.values.shape[1] == 1
    assert ours.why_not_captured() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is not in use")
@pytest.mark.parametrize("use_kernels", [False, True], ids=["torch", "kernels"])
def test_a_wrong_head_or_a_missing_part_is_seen(
    use_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = random_sequences(2, 12, 5)
    want = torch.cat(reference_logits(tiny_model("deepseek_v3"), sequences))

    def error() -> float:
        ours = served(tiny_model("deepseek_v3"))
        for layer in ours.layers:
            layer.use_kernels = use_kernels
        return relative_error(torch.cat(Driver(ours).play(sequences)), want)

    assert error() < LIMIT
    absorb, write = LatentLinear.absorb, AttentionLayer.write
    faults: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (LatentLinear, "absorb", lambda self, query: absorb(self, query.roll(1, 1))),
        (AttentionLayer, "write", lambda self, key, value: write(self, key, 0 * value)),
        (LatentLinear, "project", lambda self, x: torch.einsum(
            "thr,hrn->thn", x, self.value_weight.roll(1, 0))),
    )  # fmt: skip
    for owner, name, fault in faults:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fault)
            assert error() > 100 * LIMIT, name


def test_gains_of_keys_that_leave_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A magnitude of DoRA by the norm of a small weight: the key it gives fits all the same."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 2 * (8 + 4), bias=False, dtype=torch.float16).requires_grad_(False)
    linear.weight.mul_(2e-3)
    latent = LatentLinear(linear, HeadColumns(2, 8, 4))
    gain = 1e4 * (1 + torch.rand(1, 24))
    query = 20 * torch.randn(3, 2, 8).half()
    rows = torch.tensor([0, 2])
    want = latent.absorb(query).float()
    monkeypatch.setattr(latent, "_extras", lambda: [(rows, SiteExtra(gain=gain))])
    keys = (gain.view(24, 1) * linear.weight.float()).view(2, 12, 16)[:, :8]
    want[rows] = torch.einsum("thk,hkr->thr", query[rows].float(), keys)
    got = latent.absorb(query).float()
    assert float((got - want).norm() / want.norm()) < 2e-3


def _bias(attention: Any) -> None:
    attention.kv_b_proj.bias = nn.Parameter(torch.zeros(attention.kv_b_proj.out_features))


def _another_order(attention: Any) -> None:
    """All keys of all heads, then all values."""
    expand = attention.expand_kv

    def expanded(latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        key, value = expand(latents, rotary)
        return key.flip(1), value

    attention.expand_kv = expanded


def _other_rotation(attention: Any) -> None:
    expand = attention.expand_kv
    attention.expand_kv = lambda latents, rotary: expand(latents, 2 * rotary)


def _of_its_own(attention: Any) -> None:
    attention.kv_b_proj = type("Own", (nn.Linear,), {})(24, attention.kv_b_proj.out_features, False)


def _without_a_name(attention: Any) -> None:
    attention.expand, attention.kv_b_proj = attention.kv_b_proj, None
    attention.expand_kv = lambda latents, rotary: (
        torch.cat((attention.expand(latents)[..., :12], rotary), 3).expand(-1, 4, -1, -1),
        attention.expand(latents)[..., :10].expand(-1, 4, -1, -1),
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_bias, "not a Linear without bias"),
        (_another_order, "not what its kv_b_proj gives head by head"),
        (_other_rotation, "not what its kv_b_proj gives head by head"),
        (_of_its_own, "not a Linear without bias"),
        (_without_a_name, "changes keys or values after they are cached"),
    ],
)
def test_what_is_not_understood_is_refused(change: Callable[[Any], None], reason: str) -> None:
    model = tiny_model("deepseek_v3")
    change(model.model.layers[1].self_attn)
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.self_attn: .*{reason}"):
        served(model)


def test_a_method_that_expands_is_needed() -> None:
    module = nn.Module()
    module.kv_b_proj = nn.Linear(4, 2 * (3 + 2), bias=False)
    latents = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 2)
    key, value = torch.split(module.kv_b_proj(latents[0]).view(1, 5, 2, 5).transpose(1, 2), 3, 3)
    expanded = torch.cat((key, latents[1].expand(-1, 2, -1, -1)), 3), value
    with pytest.raises(ModelError, match="has no method expand_kv"):
        find_columns("attn", module, latents, expanded)
    module.__dict__["expand_kv"] = lambda *_: expanded
    assert find_columns("attn", module, latents, expanded) == HeadColumns(2, 3, 2)


def test_cached_prefixes_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    """The latents in the prefix cache give what computing them anew gives."""
    files = Files(make_model("deepseek_v3"), tmp_path)
    folder = files.save("all", files.factors)
    ids = [3 + 7 * i % 50 for i in range(37)]
    prompts = [{"prompt_token_ids": ids[:stop]} for stop in (37, 37, 33, 37)]
    who = ["all", None, "all", "all"]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)

    def answers(caching: bool) -> tuple[list[int], list[float], int]:
        llm = make_llm(files.model, enable_prefix_caching=caching, block_size=4)
        llm.load_adapter("all", str(folder))
        tokens, chances = [], []
        for prompt, name in zip(prompts, who, strict=True):  # one after another: each finds more
            (output,) = llm.generate(prompt, params, adapter=name)[0].outputs
            assert output.logprobs is not None
            tokens += output.token_ids
            rows = zip(output.token_ids, output.logprobs, strict=True)
            chances += [row[token].logprob for token, row in rows]
        return tokens, chances, llm.engine.stats().prefix_hit_tokens

    tokens, chances, none = answers(caching=False)
    cached_tokens, cached, hits = answers(caching=True)
    assert none == 0
    assert hits == 32 + 36  # of the two that come again with the adapter, none of base's
    assert cached_tokens == tokens
    assert cached == pytest.approx(chances, abs=1e-5)
    assert tokens[:4] != tokens[4:8]
