"""The demo's tasks, and words to try them on."""

import random
import string
from collections.abc import Callable

TASKS: dict[str | None, Callable[[str], str]] = {
    None: lambda word: word,
    "upper": str.upper,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(chr((ord(c) - 97 + 1) % 26 + 97) for c in word),
}
NAMES = tuple(TASKS)


def random_words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 12))) for _ in range(count)
    ]


def expected(name: str | None, word: str) -> str:
    return TASKS[name](word)
