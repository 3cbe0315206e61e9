"""Blocking calls beside the event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def beside(function: Callable[[], T]) -> T:
    """Run `function` on a new thread. A daemon: one that never returns must not keep the process
    alive, as asyncio's own worker threads would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def work() -> None:
        told: Callable[[Any], None]
        outcome: Any
        try:
            told, outcome = future.set_result, function()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            told, outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, told, outcome)

    threading.Thread(target=work, name="vexpert-beside", daemon=True).start()
    return await future
