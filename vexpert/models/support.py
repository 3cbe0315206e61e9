"""Which architectures are served: those that the tests found exact. Any other is refused."""

from typing import Any

from vexpert.errors import ModelError
from vexpert.models.checkpoint import is_causal_lm

# model types of transformers whose logits equal its eager attention and experts, chunked prefill
# mixed with decode; docs/models.md is made from the same test
EXACT: frozenset[str] = frozenset()

# model types that are refused, with the reason
REFUSED: dict[str, str] = {}


def refusal(model_config: Any) -> str | None:
    """Why this config cannot be served, or None; decided before any weight is read."""
    model_type = model_config.get_text_config().model_type
    reason = REFUSED.get(model_type)
    if reason is not None:
        return reason
    if getattr(model_config, "is_encoder_decoder", False):
        return "encoder-decoder models are not served"
    if not is_causal_lm(model_config):
        return "transformers has no causal language model for it"
    quantization = getattr(model_config, "quantization_config", None)
    if quantization is not None:
        return f"its weights are quantized ({_method(quantization)}); use a bf16 or fp32 checkpoint"
    if model_type not in EXACT:
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
