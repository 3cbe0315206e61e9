"""What tokens write, for the families of tokenizers: byte level, byte fallback, characters."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vexpert.engine.grammar import Grammars
from vexpert.engine.structured_outputs import StructuredOutputs
from vexpert.engine.vocabulary import token_bytes, unwritable

pytest.importorskip("xgrammar")
TEXTS = ['{"name": "Zoë", "n": [1, 2]}', "the quick brown fox", "naïve 日本 text\n\tand more"] * 5
SPECIAL = ["<s>", "</s>", "<|tool|>"]


def byte_level() -> Any:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", additional_special_tokens=["<|tool|>"]
    )


def byte_fallback() -> Any:
    """As Llama 2 and Mistral have it: a mark for spaces, and bytes for what is in no piece."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({c for text in TEXTS for c in text if c.isascii() and c not in " \n\t"})
    pieces += ["\u2581", *letters, "th", "\u2581q", '"n']
    merges = [("t", "h"), ("\u2581", "q"), ('"', "n")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|tool|>"],
    )


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_bytes_of_tokens_are_those_of_the_text(build: Any) -> None:
    tokenizer = build()
    size = len(tokenizer) + 7  # a model may have more rows than its tokenizer has tokens
    pieces = token_bytes(tokenizer, size)
    assert len(pieces) == size
    assert not any(pieces[-7:])
    for text in TEXTS[:3]:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        written = b"".join(pieces[token] for token in tokens).decode()
        assert written.removeprefix(" ") == text
        assert tokenizer.decode(tokens) == text
    for name in ("</s>", "<|tool|>"):
        assert pieces[tokenizer.convert_tokens_to_ids(name)] == b""
    assert unwritable(pieces, '{}[]":,é日') is None


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_a_grammar_follows_the_tokens_of_a_right_text(build: Any) -> None:
    tokenizer = build()
    eos = tokenizer.eos_token_id
    grammars = Grammars(tokenizer, len(tokenizer), (eos,))
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"enum": [1]}}}
    matcher = grammars.matcher(StructuredOutputs(json=schema))
    text = json.dumps({"name": "Zoë \\ naïve 日本", "n": 1}, ensure_ascii=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    space = tokenizer.convert_tokens_to_ids("\u2581")
    tokens = tokens[1:] if build is byte_fallback and tokens[0] == space else tokens
    for token in [*tokens, eos]:
        matcher.accept(token)
    assert matcher.state.is_terminated()
