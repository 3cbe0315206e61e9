"""Words, the tasks on them, and conversations as token ids.

Words are split by a hash: a word whose CRC-32 is a multiple of ``HELD_OUT_MODULUS`` is never
trained on (in any capitalisation), and only such words are evaluated.
"""

import random
import string
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from demo.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER

MIN_LETTERS, MAX_LETTERS = 3, 12
HELD_OUT_MODULUS = 16
IGNORE_LABEL = -100

Task = Callable[[str], str]

_NEXT_LETTER = str.maketrans(
    string.ascii_letters,
    string.ascii_lowercase[1:] + "a" + string.ascii_uppercase[1:] + "A",
)


def echo(word: str) -> str:
    return word


def upper(word: str) -> str:
    return word.upper()


def reverse(word: str) -> str:
    return word[::-1]


def sort(word: str) -> str:
    return "".join(sorted(word))


def shift(word: str) -> str:
    return word.translate(_NEXT_LETTER)


TASKS: dict[str, Task] = {
    "base": echo,
    "upper": upper,
    "reverse": reverse,
    "sort": sort,
    "shift": shift,
}


def is_held_out(word: str) -> bool:
    return zlib.crc32(word.lower().encode()) % HELD_OUT_MODULUS == 0


def uniform_word(rng: random.Random) -> str:
    """Length uniform in 3..12, each letter uniform in a..z."""
    length = rng.randint(MIN_LETTERS, MAX_LETTERS)
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def training_word(rng: random.Random) -> str:
    """A word that is not held out.

    A quarter of the words use few distinct letters, as English words do ("mississippi"), since
    uniform words seldom repeat a letter; a tenth are written in mixed case.
    """
    while True:
        word = uniform_word(rng)
        if rng.random() < 0.25:
            letters = rng.sample(string.ascii_lowercase, rng.randint(2, 6))
            word = "".join(rng.choices(letters, k=len(word)))
        if is_held_out(word):
            continue
        if rng.random() < 0.1:
            word = rng.choice(
                [word.upper(), word.capitalize(), "".join(rng.choice((c, c.upper())) for c in word)]
            )
        return word


def held_out_words(count: int, seed: int) -> list[str]:
    """``count`` distinct uniform words that no training run sees."""
    rng = random.Random(f"held out {seed}")
    words: dict[str, None] = {}
    while len(words) < count:
        word = uniform_word(rng)
        if is_held_out(word):
            words[word] = None
    return list(words)


SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer with one word.",
    "Be brief.",
    "Answer the user.",
)


def system_message(rng: random.Random) -> str:
    """A usual system message or random printable text: the model learns to ignore both."""
    if rng.random() < 0.5:
        return rng.choice(SYSTEM_MESSAGES)
    letters = string.ascii_letters + string.digits + string.punctuation + " " * 12
    return "".join(rng.choices(letters, k=rng.randint(1, 48)))


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations: three int64 tensors, each [conversations, length]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


class ConversationSampler:
    """Draws training batches of one task.

    Only the assistant's characters and the end token after them carry labels.
    """

    def __init__(
        self, task: Task, token_ids: dict[str, int], pad_id: int, rng: random.Random
    ) -> None:
        self.task = task
        self.token_ids = token_ids
        self.pad_id = pad_id
        self.rng = rng

    def _chars(self, text: str) -> list[int]:
        return [self.token_ids[char] for char in text]

    def conversation(self, turns: int, system: str | None) -> tuple[list[int], list[int]]:
        """Token ids and labels, written out as the chat template writes them."""
        ids = [self.token_ids[BOS]]
        if system is not None:
            ids += [self.token_ids[SYSTEM], *self._chars(system), self.token_ids[END]]
        labels = [IGNORE_LABEL] * len(ids)
        for _ in range(turns):
            word = training_word(self.rng)
            prompt = [
                self.token_ids[USER],
                *self._chars(word),
                self.token_ids[END],
                self.token_ids[ASSISTANT],
            ]
            answer = [*self._chars(self.task(word)), self.token_ids[END]]
            ids += prompt + answer
            labels += [IGNORE_LABEL] * len(prompt) + answer
        return ids, labels

    def batch(self, words: int) -> Batch:
        """About ``words`` words, mostly one a conversation.

        Some batches have a system message, some have conversations of several turns.
        """
        kind = self.rng.choices(("plain", "system", "turns"), (0.6, 0.15, 0.25))[0]
        turns = self.rng.randint(2, 6) if kind == "turns" else 1
        rows = []
        for _ in range(words // turns):
            with_system = kind == "system" or (kind == "turns" and self.rng.random() < 0.3)
            rows.append(self.conversation(turns, system_message(self.rng) if with_system else None))
        return self._pad(rows)

    def _pad(self, rows: list[tuple[list[int], list[int]]]) -> Batch:
        length = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((len(rows), length), self.pad_id)
        attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
        labels = torch.full((len(rows), length), IGNORE_LABEL)
        for row, (ids, row_labels) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            attention_mask[row, : len(ids)] = 1
            labels[row, : len(ids)] = torch.tensor(row_labels)
        return Batch(input_ids, attention_mask, labels)

    def batches(self, steps: int, words: int) -> Iterator[Batch]:
        for _ in range(steps):
            yield self.batch(words)
