"""Random requests that share prefixes and adapters, and what they get alone and together."""

import random
from typing import Any

from helpers_engine import VOCAB, make_engine, run_all, run_one

from vexpert.engine.engine import Engine
from vexpert.engine.outputs import RequestOutput
from vexpert.engine.sampling_params import SamplingParams

Work = tuple[list[int], SamplingParams, str | None]
NAMES = (None, "red", "green", "blue", "grey")


def random_work(rng: random.Random, count: int) -> list[Work]:
    """Prompts that often share a prefix, for base and four adapters, greedy and seeded."""
    stems = [[rng.randrange(2, VOCAB) for _ in range(20)] for _ in range(2)]
    work = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randrange(1, 21)]
        tail = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(0, 12))]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            temperature=rng.choice((0.0, 0.8)),
            top_k=rng.choice((0, 10)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            seed=rng.randrange(1000),
            max_tokens=rng.randrange(1, 24),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=rng.choice((None, None, 2)),
            logprobs=rng.choice((None, 2)),
        )
        work.append((stem + tail, params, rng.choice(NAMES)))
    return work


def facts(output: Any) -> Any:
    rows = [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs]
    return rows, output.prompt_logprobs


def alone(work: list[Work]) -> list[Any]:
    """Each request on an engine of its own, with room for everything."""
    return [
        facts(run_one(make_engine(max_num_batched_tokens=64), tokens, params, adapter))
        for tokens, params, adapter in work
    ]


def together(engine: Engine, work: list[Work], rng: random.Random) -> list[Any]:
    """All requests on one engine, arriving while it runs."""
    last: dict[str, RequestOutput] = {}
    for number, (tokens, params, adapter) in enumerate(work):
        engine.add_request(str(number), None, tokens, params, adapter)
        for _ in range(rng.choice((0, 0, 1, 2))):
            last |= {output.request_id: output for output in engine.step()}
            engine.check_integrity()
    last |= run_all(engine)
    return [facts(last[str(number)]) for number in range(len(work))]
