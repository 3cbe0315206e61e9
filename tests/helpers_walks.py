"""Random texts of a compiled grammar."""

import random
from functools import lru_cache
from typing import Any

from vexpert.engine.grammar import Compilers, compile_text
from vexpert.engine.grammar_cache import key_of
from vexpert.engine.structured_outputs import StructuredOutputs

END = 0
# Whole characters, as a tokenizer of real text has them; the first is the end.
TOKENS = [b"", *(bytes([byte]) for byte in range(127))]
TOKENS += [character.encode() for character in "éü\u0416\u65e5\u2028\U0001f600\U0001f602\ufeff"]
CLOSERS = {END, *(TOKENS.index(mark) for mark in (b'"', b"}", b"]"))}


@lru_cache(maxsize=1)
def compiler() -> Any:
    return Compilers(TOKENS, [END]).get(False)


def compiled(wanted: StructuredOutputs) -> Any:
    """The grammar; raises RuntimeError where the compiler finds a fault of its own."""
    return compile_text(compiler(), *key_of(wanted))


def walk(grammar: Any, rng: random.Random, steps: int = 300) -> str | None:
    """A text of `grammar`, which ends soon where it may; None if it did not in `steps`."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    text = b""
    for _ in range(steps):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(len(TOKENS)) if words[t // 32] >> (t % 32) & 1]
        assert allowed, f"nothing may follow {text!r}"
        closing = [token for token in allowed if token in CLOSERS]
        token = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        assert matcher.accept_token(token)
        if token == END:
            return text.decode()
        text += TOKENS[token]
    return None
