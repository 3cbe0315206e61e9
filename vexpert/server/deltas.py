"""What a request gained in a step, on the engine's side: outputs are whole, messages are not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vexpert.engine.outputs import CompletionOutput, RequestOutput
from vexpert.server.progress import Delta, Tracker, Update
from vexpert.server.wire import error_fields, read_row, row_fields

Entry = tuple[Any, ...]


@dataclass
class _Cursor:
    text: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass
class Progress:
    """How much of one request was told; `every_step` False: its text goes once, at the end."""

    key: int
    request_id: str
    every_step: bool
    num_tokens: int = 0  # generated, over all n completions
    told_prompt: bool = False  # its log-probabilities go once: with the first update, of a stream
    cursors: dict[int, _Cursor] = field(default_factory=dict)

    def entry(self, output: RequestOutput) -> Entry:
        """(key, new tokens, finished, error, update or None), the update as it travels.

        (key, text, token ids) where a request that goes on gained that alone, as most do.
        """
        if self.told_prompt and output.error is None and len(output.outputs) == 1:
            part = output.outputs[0]
            if part.finish_reason is None and part.logprobs is None:
                return self._plain_entry(part)
        total = sum(len(completion.token_ids) for completion in output.outputs)
        new, self.num_tokens = total - self.num_tokens, total
        error = None if output.failure is None else error_fields(output.failure)
        return self.key, new, output.finished, error, self._update(output)

    def _plain_entry(self, part: CompletionOutput) -> Entry:
        cursor = self.cursors[part.index]
        text, tokens = part.text[cursor.text :], part.token_ids[cursor.tokens :]
        cursor.text, cursor.tokens = len(part.text), len(part.token_ids)
        self.num_tokens += len(tokens)
        return self.key, text, tokens

    def _update(self, output: RequestOutput) -> tuple[Any, ...] | None:
        if output.error is not None or not (self.every_step or output.finished):
            return None
        deltas = [delta for part in output.outputs if (delta := self._delta(part))]
        if not deltas and not output.finished:
            return None
        rows = None if self.told_prompt else output.prompt_logprobs
        self.told_prompt = True
        prompt = None if rows is None else [row_fields(row) for row in rows]
        return deltas, output.num_cached_tokens, prompt

    def _delta(self, part: CompletionOutput) -> tuple[Any, ...] | None:
        cursor = self.cursors.setdefault(part.index, _Cursor())
        if cursor.finished:
            return None
        text, tokens = part.text[cursor.text :], part.token_ids[cursor.tokens :]
        rows = None if part.logprobs is None else part.logprobs[cursor.tokens :]
        cursor.finished = part.finish_reason is not None
        if not (text or tokens or cursor.finished):
            return None
        cursor.text, cursor.tokens = len(part.text), len(part.token_ids)
        shown = None if rows is None else [row_fields(row) for row in rows]
        return part.index, text, tokens, shown, part.finish_reason, part.stop_reason


def read_update(fields: list[Any], finished: bool, tracker: Tracker) -> Update:
    """The update of an entry; `tracker` keeps the prompt's log-probabilities for the next ones."""
    deltas, cached, prompt = fields
    if prompt is not None:
        tracker.prompt_logprobs = tuple(read_row(row) for row in prompt)
    tracker.num_cached_tokens = cached
    read = [_read_delta(*delta) for delta in deltas]
    tracker.reasons += [delta.finish_reason for delta in read if delta.finish_reason is not None]
    return Update(read, finished, cached, tracker.prompt_logprobs)


def read_plain(text: str, tokens: list[int], tracker: Tracker) -> Update:
    """The update of an entry that is text and token ids alone."""
    delta = Delta(0, text, tokens, None, None, None)
    return Update([delta], False, tracker.num_cached_tokens, tracker.prompt_logprobs)


def _read_delta(index: int, text: str, tokens: list[int], rows: Any, *reasons: Any) -> Delta:
    read = None if rows is None else [row for each in rows if (row := read_row(each)) is not None]
    return Delta(index, text, tokens, read, *reasons)


def merge(updates: Sequence[Update]) -> Update:
    """Updates of one request, in order, as one."""
    if len(updates) == 1:
        return updates[0]
    parts: dict[int, list[Delta]] = {}
    for update in updates:
        for delta in update.deltas:
            parts.setdefault(delta.index, []).append(delta)
    return updates[-1]._replace(deltas=[_join(each) for each in parts.values()])


def _join(deltas: list[Delta]) -> Delta:
    """Deltas of one completion as one."""
    last = deltas[-1]
    rows = None
    if last.logprobs is not None:
        rows = [row for delta in deltas for row in delta.logprobs or ()]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return last._replace(text="".join(d.text for d in deltas), token_ids=tokens, logprobs=rows)
