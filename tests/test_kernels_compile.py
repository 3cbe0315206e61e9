"""What only a compiled kernel shows, from its PTX for an H200; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_factors_are_loaded_16_bytes_at_a_time() -> None:
    """Their alignment is a promise to the compiler; where it is lost, loads shrink to 2 bytes."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "helpers_compile.py")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, loads in json.loads(done.stdout.splitlines()[-1]).items():
        assert loads["narrower"] == 0, name
        assert loads["by 2"] == 0 or name == "down", name  # there, where the runs are
        assert loads["by 16"] > 0, name
