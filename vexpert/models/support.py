"""Which architectures are served: those that the tests found exact. Any other is refused."""

from typing import Any

from vexpert.errors import ModelError
from vexpert.models.checkpoint import is_causal_lm, takes_text_config


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXACT_MOE = _names(
    "afmoe aria_text axk1 beam cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe "
    "flex_olmo flint gemma4_text glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa "
    "granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 laguna llama4_text mellum mimo_v2_flash "
    "minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe sarvam_mla sarvam_moe solar_open"
)
EXACT_DENSE = _names(
    "apertus arcee bitnet cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 "
    "gpt_neox granite granite_swa hunyuan_v1_dense internlm3 jais2 llama minicpm3 ministral "
    "ministral3 mistral nanochat nemotron olmo olmo2 olmo3 phi3 qwen2 qwen3 seed_oss smollm3 "
    "stablelm starcoder2 vaultgemma youtu"
)
# Model types whose logits equal transformers' eager attention and experts, chunked prefill mixed
# with decode: measured by the tests, which also make docs/models.md.
EXACT = EXACT_MOE | EXACT_DENSE

_STATE = "some layers keep a convolution or recurrent state, not a KV cache"
_INDEXER = "its sparse attention picks keys with an indexer that keeps a cache of its own"
_OWN_EXPERTS = "its experts do not run through transformers' ExpertsInterface"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        _names(
            "bailing_hybrid bamba falcon_h1 granitemoehybrid inkling2_loop_text inkling2_text "
            "inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 minimax nemotron_h "
            "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text zamba zamba2 "
            "zaya"
        ),
        _STATE,
    ),
    **dict.fromkeys(
        _names("axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text"), _INDEXER
    ),
    **dict.fromkeys(("dbrx", "longcat_flash"), _OWN_EXPERTS),
    "deepseek_v4": "its attention reads keys that several tokens were compressed into",
    "diffllama": "it changes keys and values after they are cached",
    "doge": "its attention mask depends on the values",
    "jetmoe": "its attention heads are routed experts of their own",
}


def refusal(model_config: Any) -> str | None:
    """Why this config cannot be served, or None; decided before any weight is read."""
    text = model_config.get_text_config()
    if getattr(model_config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not is_causal_lm(model_config):
        return "transformers has no causal language model for it"
    if text.model_type in REFUSED:
        return REFUSED[text.model_type]
    if not takes_text_config(model_config):
        return "it is multimodal, and transformers has no text-only model for it"
    quantization = getattr(model_config, "quantization_config", None)
    if quantization is not None:
        return f"its weights are quantized ({_method(quantization)}); use a bf16 or fp32 checkpoint"
    if text.model_type not in EXACT:
        return "it is not among the architectures verified exact (docs/models.md)"
    return None


def _method(quantization: Any) -> str:
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method", "unknown method"))
    return str(getattr(quantization, "quant_method", "unknown method"))


def check_supported(model_config: Any) -> None:
    """Raise ModelError with the reason if this config cannot be served."""
    reason = refusal(model_config)
    if reason is not None:
        raise ModelError(f"model type {model_config.model_type!r} cannot be served: {reason}")


def longest_context(model_config: Any) -> int:
    """Positions whose rotary frequencies do not depend on the other sequences of the batch.

    Long-rope and dynamic scaling switch all positions to other frequencies once one sequence is
    longer than the original length, so such models stop there.
    """
    text = model_config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        raise ModelError(f"{text.model_type}: its config has no max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if entry.get("rope_type") in ("longrope", "dynamic"):
            limit = min(limit, entry.get("original_max_position_embeddings") or limit)
    return int(limit)
