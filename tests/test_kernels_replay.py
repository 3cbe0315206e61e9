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
        "never replayed": [5, 5, 5, 5, 5],
        "because": [
            "a launch is of another kind, or on a tensor that is no input",
            "it computes with mul_",
            "two recordings differ",
            "a result has no memory of its own",  # but is part of another
            "a result has no memory of its own",  # but that of another result
        ],
        # Recorded twice, and once at another length; what it holds runs only to be recorded.
        "product": [True, 2, 2],
        "product at another length": [True, 1, 1],
        "watched": 2,
        "not watched any more": 0,
        "bounded": 9,
    }
