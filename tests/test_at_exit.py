"""The end of a process that has threads in PyTorch: it is no abort, and it is soon."""

import signal
import subprocess
import sys
import time

import pytest
from helpers_wait import wait_for

from vexpert.at_exit import SECONDS

# Each tensor takes the interpreter's lock as it is freed. A thread that is late with them comes
# back to an interpreter that is ending.
TENSORS = """
import threading, time, torch
told = threading.Event()

def many():
    return [torch.ones(1) for _ in range(80_000)]
"""
FAILED_LOAD = """
from vexpert.lora.loading import LoaderPool

def work():
    tensors = many()
    raise ValueError  # its traceback holds them, until all is told

pool = LoaderPool()
pool.submit(work, lambda result, error: told.set())
"""
LOAD = """
from vexpert.lora.loading import LoaderPool

def work():
    told.set()
    many()

pool = LoaderPool()
pool.submit(work, lambda result, error: None)
"""
CALL = """
from vexpert.server.daemon_pool import DaemonPool

def work():
    told.set()
    many()

pool = DaemonPool(1, "calls")
pool.submit(work)
"""
HANG = """
from vexpert.lora.loading import LoaderPool

def work():
    told.set()
    threading.Event().wait()

pool = LoaderPool()
pool.submit(work, lambda result, error: None)
"""
QUEUED = """
from vexpert.lora.loading import LoaderPool

def work():
    told.set()
    time.sleep(0.3)
    print("worked", flush=True)

pool = LoaderPool(threads=1)
for _ in range(3):
    pool.submit(work, lambda result, error: None)
"""
ENDS = "\ntold.wait()\nprint('ends', flush=True)\nbegan = time.monotonic()\n"
AFTER = "import atexit\natexit.register(lambda: print(time.monotonic() - began))\n"  # runs last


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("script", [FAILED_LOAD, LOAD, CALL], ids=["failed", "load", "call"])
def test_a_thread_that_frees_tensors_as_the_process_ends_aborts_nothing(script: str) -> None:
    done = run(TENSORS + script + ENDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_a_thread_that_hangs_holds_the_end_up_for_a_moment() -> None:
    done = run(AFTER + TENSORS + HANG + ENDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert SECONDS <= float(done.stdout.split()[1]) < 20 * SECONDS


def test_idle_threads_end_at_once_and_no_job_is_begun() -> None:
    done = run(AFTER + TENSORS + QUEUED + ENDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["ends", "worked"]
    assert done.stdout.count("worked") == 1
    idle = TENSORS + FAILED_LOAD.replace("many()", "None") + "told.wait(); time.sleep(0.2)" + ENDS
    assert float(run(AFTER + idle).stdout.split()[1]) < 0.5 * SECONDS


def test_a_load_after_the_wait_has_a_thread_of_its_own() -> None:
    """Handlers that were registered before run after it."""
    late = """
import atexit, sys, threading
def load():
    told = threading.Event()
    pool.submit(lambda: "late", lambda result, error: (print(result), told.set()))
    assert told.wait(60)
if sys.version_info < (3, 12):  # later ones start no thread any more
    atexit.register(load)
else:
    print("late")
from vexpert.lora.loading import LoaderPool
pool, began = LoaderPool(), threading.Event()
pool.submit(lambda: 1, lambda result, error: began.set())
began.wait()
"""
    done = run(late)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


def test_a_thread_whose_start_was_cut_short_is_not_waited_for() -> None:
    cut = """
import threading
from vexpert.at_exit import start_daemon
class Cut(BaseException): pass
def wait(event, timeout=None): raise Cut
real, threading.Event.wait = threading.Event.wait, wait
threading.Thread._bootstrap = lambda thread: None  # never gets there
try:
    start_daemon(print, "cut", None)
except Cut:
    threading.Event.wait = real
"""
    done = run(cut)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_the_wait() -> None:
    script = "import vexpert.at_exit\nvexpert.at_exit.SECONDS = 100\n" + TENSORS + HANG + ENDS
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ends\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: process.poll() is not None)
    assert (process.returncode, process.communicate()[1]) == (0, "")


def test_a_forked_process_ends_without_the_threads_that_it_has_not() -> None:
    fork = """
import os, sys
child = os.fork()
if child == 0:
    vexpert.at_exit.end_all()
    os._exit(7)
status = os.waitpid(child, 0)[1]
os._exit(os.waitstatus_to_exitcode(status) - 7)
"""
    script = "import vexpert.at_exit\nvexpert.at_exit.SECONDS = 100\n" + TENSORS + HANG
    began = time.monotonic()
    assert run(script + "told.wait()" + fork).returncode == 0
    assert time.monotonic() - began < 60
