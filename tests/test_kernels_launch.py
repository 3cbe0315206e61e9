"""Direct launches against Triton's own, with kernels compiled for an H200; needs no GPU."""

from helpers_process import run_helper


def test_direct_launches_are_those_of_triton() -> None:
    said = run_helper("helpers_launch.py")
    assert said.pop("binaries") > 40
    assert said == {
        "wrong": 0,
        "not direct": 4,  # on each of two devices an unknown option, and a grid to be called
        "hooked": ["plain"],
        "direct without hooks": True,
        "compiled only": True,
        "a tensor of the host": True,
        "a mistake": True,
        "new numbers": [True, True, True],
        "bounded": True,
    }
