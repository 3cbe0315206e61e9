"""PEFT's trainable tokens: <module>.token_adapter.trainable_tokens_delta [n, dim].

Despite the name the rows replace the base rows of `trainable_token_indices`, in that order.
"""

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.checks import require_finite
from vexpert.lora.formats.context import shapes
from vexpert.lora.keys import Piece
from vexpert.lora.types import EmbeddingTarget, LinearTarget, TokenRows


def read_tokens(
    target: EmbeddingTarget | LinearTarget, piece: Piece, config: AdapterConfig
) -> TokenRows:
    """Replaced rows of one embedding or of lm_head."""
    indices = _indices(piece.module, config)
    if isinstance(target, EmbeddingTarget):
        vocabulary, dim = target.num_embeddings, target.embedding_dim
    else:
        vocabulary, dim = target.out_features, target.in_features
    outside = [i for i in indices if not 0 <= i < vocabulary]
    if outside:
        raise AdapterError(
            f"trainable_token_indices {outside} are outside the vocabulary of {vocabulary}: the "
            "adapter was made for another tokenizer or a resized model"
        )
    if tuple(piece.tensor.shape) != (len(indices), dim):
        raise AdapterError(
            f"{shapes(piece)}: trainable_token_indices names {len(indices)} tokens, so it must be "
            f"[{len(indices)}, {dim}]"
        )
    require_finite(piece.key, piece.tensor)
    return TokenRows(indices, piece.tensor.clone())


def _indices(module: str, config: AdapterConfig) -> tuple[int, ...]:
    for name, indices in config.token_indices.items():
        if module == name or module.endswith(f".{name}"):
            return indices
    raise AdapterError(
        f"{module} has trained token rows, but trainable_token_indices in adapter_config.json "
        f"names only {sorted(config.token_indices)}: which rows they are is unknown"
    )
