"""A real `vexpert serve` process for tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serve(*arguments: str) -> Iterator[str]:
    """Run the server until the block ends; yields its URL, read off the ready line."""
    command = [sys.executable, "-m", "vexpert", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("vexpert ready: "):
                break
        assert lines, "the server printed nothing"
        assert lines[-1].startswith("vexpert ready: http://127.0.0.1:"), "".join(lines)
        yield lines[-1].split()[2]
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 0, f"the server ended with {process.returncode}"
