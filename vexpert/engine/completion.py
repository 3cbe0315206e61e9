"""What a new token does to its sequence: text, log-probabilities, and whether it is the last."""

from collections.abc import Callable
from functools import lru_cache

from vexpert.engine.detokenizer import Tokenizer
from vexpert.engine.logprobs import TokenLogprobs
from vexpert.engine.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput
from vexpert.engine.request import Request, Sequence

Reason = tuple[str, int | str | None]  # finish_reason, stop_reason


class Completer:
    """Appends tokens to sequences and builds outputs. Knows the model's limits, no scheduling."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], max_model_len: int
    ) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._decode_one: Callable[[int], str] = lru_cache(maxsize=65536)(
            lambda token: tokenizer.decode([token], skip_special_tokens=False)
        )

    def append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Add a sampled token; True if the sequence ends with it, its reason then set."""
        sequence.append(token)
        if logprobs is not None:
            sequence.logprobs.append(self.logprob_row(logprobs))
            sequence.cumulative_logprob += logprobs.entries[0][1]
        reason = self._ending(sequence, token)
        if reason is None:
            return False
        sequence.finish_reason, sequence.stop_reason = reason
        return True

    def _ending(self, sequence: Sequence, token: int) -> Reason | None:
        params = sequence.request.params
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop = is_eos or token in sequence.request.stop_token_ids
        if not is_stop or params.include_stop_str_in_output:
            new = sequence.detokenizer.append(token)
            beyond_min = len(sequence.output_token_ids) > params.min_tokens
            stop = sequence.text.append(new, beyond_min or params.min_tokens == 0)
            if stop is not None and not is_stop:
                return "stop", stop
        if is_stop:
            return "stop", None if is_eos else token
        if params.max_tokens is not None and len(sequence.output_token_ids) >= params.max_tokens:
            return "length", None
        return ("length", None) if sequence.num_known >= self._max_model_len else None

    def logprob_row(self, logprobs: TokenLogprobs) -> LogprobRow:
        """The chosen token first, then the likeliest in order."""
        return {
            token: Logprob(value, rank, self._decode_one(token))
            for token, value, rank in logprobs.entries
        }


def request_output(request: Request) -> RequestOutput:
    """The request's state now; copies nothing, so a step costs the same at any length."""
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(sequence) for sequence in request.sequences],
        finished=request.is_finished,
        adapter=None if request.adapter is None else request.adapter.name,
        prompt_logprobs=request.prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens,
        error=request.error,
        lost_adapter=request.lost_adapter,
    )


def _completion(sequence: Sequence) -> CompletionOutput:
    wants_logprobs = sequence.request.params.logprobs is not None
    text = sequence.text
    return CompletionOutput(
        index=sequence.index,
        text=text.visible() if sequence.finish_reason is None else text.text,
        token_ids=sequence.output_token_ids,
        cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
        logprobs=sequence.logprobs if wants_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
