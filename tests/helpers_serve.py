"""A real `vexpert serve` process for tests."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(*arguments: str) -> Iterator[str]:
    """Run the server until the block ends; yields its URL, read off the ready line."""
    port = free_port()
    command = [sys.executable, "-m", "vexpert", "serve", *arguments, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("vexpert ready: "):
                break
        assert lines, "the server printed nothing"
        assert lines[-1].startswith(f"vexpert ready: http://127.0.0.1:{port} "), "".join(lines)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, f"the server ended with {process.returncode}"
