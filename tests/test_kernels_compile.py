"""What only a compiled kernel shows, from its PTX for an H200; needs no GPU."""

from helpers_process import run_helper


def test_factors_are_loaded_16_bytes_at_a_time() -> None:
    """Their alignment is a promise to the compiler; where it is lost, loads shrink to 2 bytes."""
    for name, loads in run_helper("helpers_compile.py").items():
        assert loads["narrower"] == 0 or name.startswith("dense product"), name  # shrunk rows there
        assert loads["by 2"] == 0 or name.endswith(("down", "joined")), (
            name
        )  # there, where the runs are
        assert loads["by 16"] > 0, name


def test_kernels_are_compiled_ahead_without_a_launch() -> None:
    assert run_helper("helpers_compile_ahead.py") == {
        "kernels": 2,
        "are compiled": True,
        "restored": True,
        "restored after an error": True,
        "a kernel that is wrong raises": True,
        "kernels at last": 3,
    }
