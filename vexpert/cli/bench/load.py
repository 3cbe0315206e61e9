"""The load of `vexpert bench serve`: what is asked, of whom, and when."""

import random
from itertools import accumulate
from typing import Any

ZIPF = 1.5  # the i-th most popular name has a share in proportion to i ** -ZIPF
POPULARITIES = ("uniform", "zipf", "identical", "distinct")


def names_asked(names: list[str], popularity: str, count: int, seed: int) -> list[str]:
    """The name of each of `count` requests; which name is how popular is the seed's choice.

    uniform: each equally likely; zipf: a few get most; identical: one gets all; distinct: in turn.
    """
    draw = random.Random(f"names {seed}")
    order = draw.sample(names, len(names))
    match popularity:
        case "uniform":
            return draw.choices(order, k=count)
        case "zipf":
            return draw.choices(order, [(i + 1) ** -ZIPF for i in range(len(order))], k=count)
        case "identical":
            return order[:1] * count
        case _:
            assert popularity == "distinct", popularity
            return [order[i % len(order)] for i in range(count)]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which each request is sent: Poisson arrivals, `rate` a second."""
    if rate == float("inf"):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    return list(accumulate((draw.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def bodies(
    names: list[str], vocab_size: int, input_len: int, output_len: int, seed: int
) -> list[dict[str, Any]]:
    """One body for each name: random token ids, so that lengths are exact and no prefix shared."""
    draw = random.Random(f"prompts {seed}")
    return [
        {
            "model": name,
            "prompt": [draw.randrange(vocab_size) for _ in range(input_len)],
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        for name in names
    ]
