"""SamplingParams: a value of another type or out of range is a RequestError that names it."""

import pytest

from vexpert.engine.sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingParams
from vexpert.errors import RequestError

INTS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
NONE_IS_FINE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
HUGE = 10**5000
BAD = [
    *[(name, value) for name in INTS for value in (1.0, True, "1", [1], HUGE, -HUGE)],
    *[
        (name, value)
        for name in FLOATS
        for value in (True, "1", [1], HUGE, float("nan"), float("inf"), 1j)
    ],
    *[(name, value) for name in FLAGS for value in (1, "yes", [])],
    *[(name, None) for name in (*INTS, *FLOATS, *FLAGS) if name not in NONE_IS_FINE],
    *[("stop", value) for value in (None, 5, [5], [None], {"a": 1}, [""], b"a", "")],
    ("stop", ["a"] * (MAX_STOPS + 1)),
    ("stop", "a" * (MAX_STOP_CHARACTERS + 1)),
    *[
        ("stop_token_ids", value)
        for value in (None, 5, "5", ["5"], [1.0], [True], [None], [0] * 1025)
    ],
    *[("logit_bias", value) for value in (None, [], 5, {"5": 1.0}, {True: 1.0}, {1.0: 1.0})],
    *[("logit_bias", {5: value}) for value in ("1", None, True, HUGE, float("nan"), 100.5)],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ("repetition_penalty", 0.009),
    ("repetition_penalty", 1e-300),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda part: type(part).__name__)
def test_bad_values_name_their_field(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{name}=") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 250


def test_the_edges_are_accepted() -> None:
    params = SamplingParams(
        temperature=1,
        top_p=1,
        repetition_penalty=0.01,
        seed=2**64 - 1,
        stop=["a" * MAX_STOP_CHARACTERS] * MAX_STOPS,
        stop_token_ids=[3],
        logit_bias={3: -100},
        max_tokens=None,
        logprobs=-1,
    )
    assert len(params.stop) == MAX_STOPS
    assert params.stop_token_ids == (3,)
    assert SamplingParams(stop="x").stop == ("x",)


def test_a_caller_may_go_on_with_what_was_given() -> None:
    """Requests that run keep the options that they were given."""
    bias, stop, tokens = {3: 1.0}, ["a"], [5]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=tokens)
    bias[4] = 2.0
    stop.append("b")
    tokens.append(6)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({3: 1.0}, ("a",), (5,))
