"""Constraints compiled to grammars, and how far each constrained sequence has come in its own."""

import importlib.metadata
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch

from vexpert.engine.grammar_cache import GrammarCache, is_lazy, key_of
from vexpert.engine.grammar_probe import Probe, always, needs_probe, walk
from vexpert.engine.grammar_text import compile_schema, compile_tag
from vexpert.engine.structured_outputs import MAX_WHITESPACE, StructuredOutputs
from vexpert.engine.vocabulary import JSON_CHARACTERS, token_bytes, unwritable, with_special_tokens
from vexpert.errors import UnsupportedError
from vexpert.log import get_logger

logger = get_logger(__name__)

CACHE_BYTES = 256 * 2**20  # of compiled grammars, the least recently used go first
QUICK_SECONDS = 1.0  # to compile
BITS = 32  # of one word of a mask


MAX_CALL_SECONDS = 1.0  # of the processor, for one token of one sequence
MAX_LOAD_SECONDS = 2.0  # of the decayed sum over a sequence's tokens: 0.2 s for each
DECAY = 0.9  # of that sum, a call
SUSPECT_SECONDS = 0.1  # by the clock, for a step's masks: the next ones are measured alone
ALONE = 8  # masks


class Matcher:
    """One sequence's place in its grammar, and what the way there took.

    A grammar's cost may double with every token, and every request of the step waits for it. A call
    cannot be interrupted; `overrun` tells after the first that was too long.
    """

    def __init__(self, matcher: Any) -> None:
        self.state = matcher  # xgrammar.GrammarMatcher
        self.overrun: str | None = None  # why the request must end
        self._load = 0.0  # seconds
        self._alone = 0  # masks that are still to be measured alone

    def accept(self, token: int) -> None:
        """Move on by a sampled token, which the last mask has allowed."""
        begun = time.thread_time()
        accepted = self.state.accept_token(token)
        self._count(time.thread_time() - begun)
        assert accepted, f"token {token} is outside the grammar"

    @property
    def is_suspect(self) -> bool:
        """Whether the next mask is to be filled alone: of a batch nobody knows whose takes long."""
        return self._alone > 0

    def suspect(self) -> None:
        """Let the next masks be filled alone."""
        self._alone = ALONE

    def fill(self, mask: torch.Tensor, row: int) -> None:
        """Write what may come next into `mask[row]`, int32 [k, ceil(vocab_size / 32)]."""
        self._alone = max(0, self._alone - 1)
        begun = time.thread_time()
        self.state.fill_next_token_bitmask(mask, row)
        self._count(time.thread_time() - begun)

    def _count(self, seconds: float) -> None:
        self._load = DECAY * self._load + seconds
        if seconds > MAX_CALL_SECONDS or self._load > MAX_LOAD_SECONDS:
            self.overrun = (
                f"structured_outputs: the grammar takes too long: {seconds:.1f} seconds for a "
                "token; simplify it, and leave out alternatives that can match the same text"
            )


class Grammars:
    """Compiles the constraints of one engine. `compile` and `matcher` may run in any thread.

    xgrammar is imported at the first use: without it everything else still works.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._making = threading.Lock()
        self._cache = GrammarCache(CACHE_BYTES)

    def is_quick(self, wanted: StructuredOutputs) -> bool:
        """Whether `compile` takes about a second at most."""
        if not needs_probe(wanted) or self._cache.get(wanted) is not None:
            return True
        try:
            _, _, probe = self._parts()
        except UnsupportedError:
            return True  # `compile` says so
        seconds = probe.seconds(wanted)
        return seconds is not None and seconds < QUICK_SECONDS

    def compile(self, wanted: StructuredOutputs, is_wanted: Callable[[], bool] = always) -> Any:
        """The compiled grammar, from the cache if it is there.

        Raises RequestError for a constraint that is malformed or that no output can meet, and soon
        after `is_wanted` says that nobody waits for it.
        """
        kept = self._cache.get(wanted)
        if kept is not None:
            return kept
        try:
            compilers, pieces, probe = self._parts()
        except UnsupportedError as error:
            raise wanted.refusal(str(error)) from error
        characters = JSON_CHARACTERS if wanted.kind in ("json", "json_object") else ""
        missing = unwritable(pieces, "".join(wanted.choice or ()) or characters)
        if missing is not None:
            raise wanted.refusal(f"{wanted.kind}: this model's tokenizer cannot write {missing!r}")
        if needs_probe(wanted):
            probe.check(wanted, is_wanted)
        try:
            compiled = self._compiled(wanted, compilers)
        except (RuntimeError, ValueError, TypeError) as error:
            raise wanted.refusal(f"{wanted.kind}: {cause(error)}") from error
        self._cache.put(wanted, compiled)
        return compiled

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """A matcher at the start of the grammar. Raises what `compile` raises."""
        import xgrammar

        compiled = self.compile(wanted)
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        matcher.fill_next_token_bitmask(mask)
        if not bool(unpack(mask, self._vocab_size).any()):
            raise wanted.refusal(f"{wanted.kind}: no token of this model can begin such an output")
        return Matcher(matcher)

    def _compiled(self, wanted: StructuredOutputs, compilers: "Compilers") -> Any:
        if wanted.special_tokens:
            with self._making:
                compilers = self._with_special
        compiled = compile_text(compilers.get(is_lazy(wanted)), *key_of(wanted))
        if is_lazy(wanted):
            walk(compiled, self._vocab_size)  # so that steps wait for fewer masks
        return compiled

    def _parts(self) -> tuple["Compilers", list[bytes], Probe]:
        with self._making:  # by several threads at once it would be made several times
            return self._made

    @cached_property
    def _made(self) -> tuple["Compilers", list[bytes], Probe]:
        """The compilers, the bytes of each token, and the process that tries constraints first."""
        if importlib.util.find_spec("xgrammar") is None:
            raise UnsupportedError("not served here: the package xgrammar is not installed")
        if not self._eos_token_ids:
            raise UnsupportedError("this model names no token that ends an output")
        pieces = token_bytes(self._tokenizer, self._vocab_size)
        compilers = Compilers(pieces, list(self._eos_token_ids))
        logger.info("structured output: xgrammar %s", importlib.metadata.version("xgrammar"))
        return compilers, pieces, Probe(pieces, self._eos_token_ids)

    @cached_property
    def _with_special(self) -> "Compilers":
        _, pieces, _ = self._made
        pieces = with_special_tokens(pieces, self._tokenizer, self._eos_token_ids)
        return Compilers(pieces, list(self._eos_token_ids))


class Compilers:
    """xgrammar's compilers for the tokens that write `pieces`: eager and lazy."""

    def __init__(self, pieces: list[bytes], eos_token_ids: list[int]) -> None:
        import xgrammar

        size = len(pieces)
        info = xgrammar.TokenizerInfo(pieces, vocab_size=size, stop_token_ids=eos_token_ids)
        threads = max(1, min(4, (os.cpu_count() or 1) // 2))
        self._made = [
            xgrammar.GrammarCompiler(
                info,
                max_threads=threads,
                cache_enabled=False,
                enable_dynamic_compilation=is_lazy,
            )
            for is_lazy in (False, True)
        ]

    def get(self, is_lazy: bool) -> Any:
        """The one that makes masks as sequences come to their places, or all of them at once."""
        return self._made[is_lazy]


def compile_text(compiler: Any, kind: str, text: str, strict: bool, is_compact: bool) -> Any:
    """The compiled grammar of a constraint's text; raises what xgrammar raises."""
    match kind:
        case "regex":
            return compiler.compile_regex(text)
        case "choice" | "grammar":
            return compiler.compile_grammar(text)
        case "structural_tag":
            return compile_tag(compiler, text)
    compact = {"any_whitespace": False, "separators": (",", ":")}
    loose = {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE}
    spacing = compact if is_compact else loose
    return compile_schema(compiler, text, strict_mode=strict, **spacing)


def cause(error: Exception) -> str:
    """The compiler's words without the place in its own source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return text.splitlines()[0][:300] if text else type(error).__name__


def mask_logits(logits: torch.Tensor, matchers: list[tuple[int, Matcher]]) -> None:
    """-inf for what the grammars forbid, in `logits` [n, V], in place; (row, matcher) each."""
    rows = torch.tensor([row for row, _ in matchers])
    vocab_size = logits.shape[1]
    allowed = unpack(fill_mask([matcher for _, matcher in matchers], vocab_size), vocab_size)
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def fill_mask(matchers: list[Matcher], vocab_size: int) -> torch.Tensor:
    """What the grammars allow next, a bit a token: int32 [k, ceil(vocab_size / 32)]."""
    import xgrammar

    mask: torch.Tensor = xgrammar.allocate_token_bitmask(len(matchers), vocab_size)
    if len(matchers) == 1 or any(matcher.is_suspect for matcher in matchers):
        for row, matcher in enumerate(matchers):
            matcher.fill(mask, row)
        return mask
    begun = time.perf_counter()
    _batch_matcher().batch_fill_next_token_bitmask([matcher.state for matcher in matchers], mask)
    if time.perf_counter() - begun > SUSPECT_SECONDS:
        for matcher in matchers:
            matcher.suspect()
    return mask


@lru_cache(maxsize=1)
def _batch_matcher() -> Any:
    """Fills the masks of many sequences in threads."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher()


def unpack(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool [k, vocab_size] of a bit mask, int32 [k, ceil(vocab_size / 32)]."""
    shifts = torch.arange(BITS, dtype=torch.int32, device=mask.device)
    bits = (mask[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
