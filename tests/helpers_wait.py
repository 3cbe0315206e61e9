"""Waiting for what a thread or a process does, however long a machine holds it up."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until `condition` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds:.0f} s in vain"
        time.sleep(0.001)
