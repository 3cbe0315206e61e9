"""PEFT's LoRA of a Linear, a router or an embedding.

<module>.lora_A.weight [r, in], <module>.lora_B.weight [out, r]; for an embedding lora_embedding_A
[r, V], lora_embedding_B [dim, r]. Extras: lora_B.bias [out], lora_magnitude_vector [out].
"""

from dataclasses import dataclass

import torch

from vexpert.errors import AdapterError
from vexpert.lora.checks import require_finite
from vexpert.lora.formats.context import Context, check_dora, shapes
from vexpert.lora.keys import Piece
from vexpert.lora.types import EmbeddingTarget, Factors, LinearTarget


@dataclass(frozen=True)
class LinearResult:
    """What one Linear's keys give."""

    factors: Factors
    bias: torch.Tensor | None = None  # [out] float32, scale folded in
    magnitude: torch.Tensor | None = None  # [out] in the file's dtype


def read_linear(
    target: LinearTarget | EmbeddingTarget, parts: dict[str, Piece], context: Context
) -> LinearResult:
    """Factors and extras of one module from its pieces by part."""
    is_embedding = isinstance(target, EmbeddingTarget)
    prefix = "embedding_" if is_embedding else ""
    a, b = _pair(parts, prefix)
    if isinstance(target, EmbeddingTarget):
        inputs, outputs = target.num_embeddings, target.embedding_dim
    else:
        inputs, outputs = target.in_features, target.out_features
    rank = a.tensor.shape[0]
    if a.tensor.shape != (rank, inputs) or b.tensor.shape != (outputs, rank):
        raise AdapterError(
            f"{shapes(a, b)}: {target.path} has in_features {inputs} and out_features {outputs}, "
            f"so lora_A must be [r, {inputs}] and lora_B [{outputs}, r] with one r; the adapter "
            "was made for another base model, or its file is broken"
        )
    context.note_format("embedding" if is_embedding else "linear")
    scale = context.scale(context.linear_name(a.module), rank)
    factors = context.factors(
        a.module, a.tensor.clone().unsqueeze(0), b.tensor.clone().unsqueeze(0), scale
    )
    bias = _vector(parts.get("B.bias"), outputs, scale)
    if context.config.lora_bias and bias is None:
        raise AdapterError(
            f"{target.path}: lora_bias is true in adapter_config.json, but {b.module}.lora_B.bias "
            "is missing: the file is incomplete; save the adapter again"
        )
    return LinearResult(
        factors,
        bias=None if bias is None else bias.float() * scale,
        magnitude=_magnitude(target, parts, outputs, context),
    )


def _pair(parts: dict[str, Piece], prefix: str) -> tuple[Piece, Piece]:
    allowed = {f"{prefix}A", f"{prefix}B"} | (set() if prefix else {"B.bias", "magnitude"})
    odd = [piece.key for part, piece in parts.items() if part not in allowed]
    if odd:
        hint = (
            "; an embedding has lora_embedding_A and lora_embedding_B: name it in target_modules, "
            "not in target_parameters, or merge the adapter into the base model"
            if prefix
            else "; save the adapter again with PEFT's save_pretrained"
        )
        raise AdapterError(f"{', '.join(odd)}: this kind of module cannot have such a tensor{hint}")
    a, b = parts.get(f"{prefix}A"), parts.get(f"{prefix}B")
    assert a is not None, "check_halves"
    assert b is not None, "check_halves"
    return a, b


def _vector(piece: Piece | None, size: int, scale: float = 1.0) -> torch.Tensor | None:
    if piece is None:
        return None
    if piece.tensor.shape != (size,):
        raise AdapterError(f"{shapes(piece)}: must be [{size}]")
    require_finite(piece.key, piece.tensor, scale)
    return piece.tensor.clone()


def _magnitude(
    target: LinearTarget | EmbeddingTarget, parts: dict[str, Piece], size: int, context: Context
) -> torch.Tensor | None:
    magnitude = _vector(parts.get("magnitude"), size)
    dora = context.config.use_dora
    if dora and isinstance(target, EmbeddingTarget):
        raise AdapterError(f"{target.path}: DoRA on an embedding is not supported")
    check_dora(target.path, dora, magnitude is not None)
    if magnitude is not None and "B.bias" in parts:
        raise AdapterError(f"{target.path}: DoRA together with lora_bias is not supported")
    return magnitude
