"""The pool for calls that may never return."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest
from helpers_wait import wait_for

from vexpert.server.daemon_pool import DaemonPool


def test_calls_return_and_raise() -> None:
    pool = DaemonPool(2, "t")
    assert [pool.submit(pow, 2, i).result(60) for i in range(5)] == [1, 2, 4, 8, 16]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(60)
    assert pool.submit(pow, 2, 9).result(60) == 512
    pool.close()


def test_where_no_thread_can_be_started_others_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, go = DaemonPool(2, "full"), threading.Event()

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(pow, 2, 2)
    first = pool.submit(go.wait, 60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        second = pool.submit(pow, 2, 3)
    go.set()
    assert first.result(60)
    assert second.result(60) == 8
    pool.close()


def test_no_more_threads_than_allowed_and_the_rest_waits() -> None:
    pool, go, begun = DaemonPool(3, "capped"), threading.Event(), []

    def work() -> None:
        begun.append(threading.current_thread().name)
        go.wait(60)

    futures = [pool.submit(work) for _ in range(20)]
    wait_for(lambda: len(begun) == 3)
    assert sum(t.name.startswith("capped-") for t in threading.enumerate()) == 3
    go.set()
    for future in futures:
        future.result(60)
    assert set(begun) == {"capped-0", "capped-1", "capped-2"}
    pool.close()


def test_an_idle_thread_is_used_again() -> None:
    pool = DaemonPool(8, "idle")
    for _ in range(5):
        pool.submit(int).result(60)
        wait_for(lambda: pool._idle == pool._threads)
    assert pool._threads == 1
    pool.close()
    wait_for(lambda: not any(t.name.startswith("idle-") for t in threading.enumerate()))


def test_what_waits_is_cancelled_by_close() -> None:
    pool, go = DaemonPool(1, "closed"), threading.Event()
    running, waiting = pool.submit(go.wait, 60), pool.submit(int)
    wait_for(running.running)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(60)
    assert pool.submit(int).cancelled()
    go.set()
    assert running.result(60)


def test_a_call_that_never_returns_keeps_no_process_alive() -> None:
    code = (
        "import threading; from vexpert.server.daemon_pool import DaemonPool;"
        "pool = DaemonPool(2, 'x'); pool.submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
