"""The tokenizer of a model, without the model."""

from typing import Any

from transformers import AutoTokenizer

from vexpert.config import EngineConfig
from vexpert.errors import ModelError
from vexpert.models.source import model_source

MIN_VOCAB = 8  # fewer tokens than any text needs


def read_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer that `config` names, or the model's own. Raises ModelError."""
    source = config.tokenizer or model_source(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"no tokenizer in {source!r}: {error}; name another with --tokenizer"
        ) from error
    if tokenizer.vocab_size < MIN_VOCAB:  # transformers makes one up where there are no files
        raise ModelError(f"no tokenizer in {source!r}; name another with --tokenizer")
    return tokenizer
