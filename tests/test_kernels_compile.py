"""What only a compiled kernel shows, from its PTX for an H200; needs no GPU."""

import triton
from helpers_process import run_helper
from packaging.version import Version


def test_factors_are_loaded_16_bytes_at_a_time() -> None:
    """Their alignment is a promise to the compiler; where it is lost, loads shrink to 2 bytes."""
    for name, loads in run_helper("helpers_compile.py").items():
        assert loads["narrower"] == 0 or name.startswith("dense product"), name  # shrunk rows there
        assert loads["by 2"] == 0 or name == "down", name  # there, where the runs are
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


def test_latent_attention_fits_an_h200() -> None:
    """Its tiles are wide: registers that spill, or more shared memory than there is, are near."""
    found = run_helper("helpers_compile_latent.py")
    assert len({name.split(",")[0] for name in found}) == 3  # both of attention, and LoRA's
    newer = Version(triton.__version__) >= Version("3.9")
    for name, takes in found.items():
        # 64 rows at a time are worth it: that many heads' decodes are bound by their products
        spills = newer and name.startswith("_decode_kernel, 128 heads")
        assert takes["spilled"] == 0 or spills, name
        assert takes["shared"] <= 227 * 1024, name
