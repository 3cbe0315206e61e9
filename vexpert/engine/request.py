"""A request and its sequences: what is known, what is computed, and where its KV lies."""

import enum

import numpy as np

from vexpert.engine.block_pool import chain_digest, root_digest
from vexpert.engine.detokenizer import Detokenizer
from vexpert.engine.outputs import LogprobRow
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.stop_strings import OutputText
from vexpert.lora.types import AdapterRef


class State(enum.Enum):
    """Life of a sequence; preemption leads from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class BlockTable:
    """Block ids of one sequence in order of position, also as an int64 array for the runner."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.array = np.zeros(8, dtype=np.int64)  # [capacity]; the first len(ids) are valid

    def extend(self, blocks: list[int]) -> None:
        old, new = len(self.ids), len(self.ids) + len(blocks)
        if new > len(self.array):
            grown = np.zeros(2 * new, dtype=np.int64)
            grown[:old] = self.array[:old]
            self.array = grown
        self.array[old:new] = blocks
        self.ids.extend(blocks)

    def clear(self) -> list[int]:
        """Empty the table and return the ids it held."""
        ids, self.ids = self.ids, []
        return ids


class Request:
    """What the caller asked for; `sequences` holds its n completions."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        adapter: AdapterRef | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.adapter = adapter
        self.stop_token_ids = frozenset(params.stop_token_ids)  # asked at every token
        self.prompt_is_done = False  # its first output token has come
        self.sequences: list[Sequence] = []
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.lost_adapter = False  # its adapter was unloaded, not to be read, or without room
        # prompt_logprobs[i] is the row of token i; filled from the left, the first is None
        self.prompt_logprobs: list[LogprobRow | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )

    @property
    def is_finished(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)

    def prompt_is_running(self) -> bool:
        """Whether a running sequence is still computing the prompt that its siblings can share."""
        last = len(self.prompt_token_ids) - 1
        return any(s.state is State.RUNNING and s.num_computed < last for s in self.sequences)


UNKNOWN = -1  # in `tokens`: a token that a step on the device is choosing


class Sequence:
    """One completion. `tokens` is the prompt and the output; the first `num_computed` have KV.

    A step that was begun counts as computed; the last token may be UNKNOWN until it has ended.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        sampling: SamplerState,
        detokenizer: Detokenizer,
    ) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival  # total order of all sequences: smaller is older
        self.sampling = sampling
        self.detokenizer = detokenizer
        self.text = OutputText(request.params)
        self.tokens = list(request.prompt_token_ids)
        self.num_known = len(self.tokens)  # those that are not UNKNOWN
        self.output_token_ids: list[int] = []
        self.logprobs: list[LogprobRow] = []
        self.cumulative_logprob = 0.0
        self.state = State.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_computed = 0
        self.num_published = 0  # full blocks that other sequences may share
        self.publish_from = 0  # tokens computed when the next of them is full
        self.source = -1  # row of the step under way that chooses the last token; -1: it is known
        self.is_ending = False  # whether the token under way is the last, whatever it is
        self.blocks = BlockTable()
        self.slot = -1
        self.times_passed = 0  # newer requests that took a slot while this one was refused one
        self.share_tag = 0.0  # see Admission
        self.was_admitted = False
        self._digests: list[bytes] = []

    @property
    def adapter(self) -> AdapterRef | None:
        return self.request.adapter

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this sequence computes its request's prompt_logprobs: the first one does."""
        return self.index == 0 and self.request.prompt_logprobs is not None

    def num_prompt_rows_done(self) -> int:
        """Prompt positions whose next token has its logprob row."""
        rows = self.request.prompt_logprobs
        return 0 if rows is None else len(rows) - 1

    def digests(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Digests of the first `num_blocks` blocks, all full."""
        while len(self._digests) < num_blocks:
            done = len(self._digests)
            parent = self._digests[-1] if self._digests else root_digest(self.adapter)
            tokens = self.tokens[done * block_size : (done + 1) * block_size]
            assert len(tokens) == block_size, "only full blocks have a digest"
            self._digests.append(chain_digest(parent, tokens))
        return self._digests[:num_blocks]

    def expect(self, row: int, max_model_len: int) -> None:
        """A step has begun that chooses the next token in its row `row`."""
        self.tokens.append(UNKNOWN)
        self.source = row
        most = self.request.params.max_tokens
        count = len(self.tokens) - len(self.request.prompt_token_ids)
        self.is_ending = len(self.tokens) >= max_model_len or (most is not None and count >= most)

    def append(self, token: int) -> None:
        """The next token, expected or not: it joins the tokens and the sampler's memory."""
        place = self.num_known
        self.num_known += 1
        if place == len(self.tokens):
            self.tokens.append(token)
        else:
            self.tokens[place] = token
            if place == len(self.tokens) - 1:
                self.source = -1
        self.output_token_ids.append(token)
        self.sampling.observe(token)
