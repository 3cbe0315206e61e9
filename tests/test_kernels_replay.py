"""Replayed operations launch what they launch when they run, or are run; needs no GPU."""

from typing import Any

import pytest
import torch
from helpers_process import run_helper

from vexpert.kernels.replay_program import Made, Program, coarse


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


def test_blocks_of_many_lengths_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of a prompt, one after another: the allocator keeps one block of each size."""
    needed = [length * 84_000 for length in range(129, 4097)]
    asked = [coarse(size) for size in needed]
    assert all(0 <= got - size <= size / 8 for got, size in zip(asked, needed, strict=True))
    assert len(set(asked)) <= 8 * 5 + 1
    assert [coarse(size) for size in (0, 1, 15, 16, 17, 512)] == [0, 1, 15, 16, 18, 512]
    made, empty = [], torch.empty

    def note(*shape: Any, **options: Any) -> torch.Tensor:
        made.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", note)
    program = Program((), 0, 1000, (Made((3, 2), torch.float32),))
    (result,) = program._run([], [], torch.device("cpu"), 0)
    assert result.shape == (3, 2)
    assert made == [1024, (3, 2)]
