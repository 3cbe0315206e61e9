"""What only a compiled kernel shows, from its PTX for an H200; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run_helper(name: str) -> Any:
    """The JSON line that a helper prints in a process without the interpreter."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
