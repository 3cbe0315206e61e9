"""Waiting for what a thread or a process does, however long a machine holds it up."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until `condition` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds:.0f} s in vain"
        time.sleep(0.001)


def on_a_thread(call: Callable[[], T], seconds: float = 30.0) -> T:
    """What `call` returns or raises; fails where it has not ended after `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it waits for more than {seconds:.0f} s"
    if errors:
        raise errors[0]
    return results[0]
