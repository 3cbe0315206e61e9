"""Replayed operations launch what they launch when they run, or are run; needs no GPU."""

from helpers_process import run_helper


def test_replays() -> None:
    assert run_helper("helpers_replay.py") == {
        "run": 2,  # of three calls: the third is replayed
        "program": True,
        "result": [True, True, True],
        "another alignment": 1,
        "another dtype": 1,
        "another size": 1,
        "another layout": 1,
        "one tensor twice": 1,
        "a tensor of the host": 1,
        # A tensor that is no input, an operation of torch, a number that changes, a part as result.
        "never replayed": [5, 5, 5, 5],
        "watched": 2,
        "not watched any more": 0,
        "bounded": 9,
    }
