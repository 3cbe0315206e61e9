"""Chat templates of adapters, rendered in processes that may be ended at any time."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from vexpert.errors import RequestError
from vexpert.log import get_logger
from vexpert.server.daemon_pool import DaemonPool
from vexpert.server.refusals import Refusals, name_of

logger = get_logger(__name__)
PROCESSES = 2
SECONDS = 2.0  # of the processor, for one rendering
WAIT_SECONDS = 30.0  # by the clock, for a process that is stopped or gets no processor
ORDINARY = {  # what a template must be able to render
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "",
    "eos_token": "",
    "pad_token": "",
    "unk_token": "",
}
COMMAND = "from vexpert.server.template_worker import main; main()"
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")  # of the environment: no keys for strangers


class _Worker:
    """One process, started at its first use and after its end. For one thread at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def ask(self, task: str) -> dict[str, str] | None:
        """The answer to one line; None: the process had to be ended, or ended itself.

        One that ended while it had nothing to do tells nothing about this line.
        """
        if self._process is not None and self._process.poll() is not None:
            self._drop()
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WAIT_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(task + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer.endswith("\n"):
            self._drop()
            return None
        found: dict[str, str] = json.loads(answer)
        return found

    def _drop(self) -> None:
        self._finalizer()
        self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a Ctrl-C is not for it
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        return process

    def close(self) -> None:
        if self._process is not None:
            self._finalizer()


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use now
                pipe.close()


class Renderer:
    """Renders templates, PROCESSES at once. What led out of bounds is refused for a while."""

    def __init__(self, most: int, seconds: float = SECONDS) -> None:
        """`most`: characters that a template may write; `seconds`: what it may take."""
        self._most, self._seconds = most, seconds
        self._pool = DaemonPool(PROCESSES, "vexpert-template")
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._refusals = Refusals()
        self._lock = threading.Lock()

    def submit(self, template: str, variables: dict[str, Any], caller: str = "") -> "Future[str]":
        """The text of `template`; RequestError if it refuses `variables` or leaves its bounds.

        `caller`: who gave the variables.
        """
        return self._pool.submit(self._render, template, variables, caller)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
        with self._lock:
            for worker in self._workers:
                worker.close()

    def _render(self, template: str, variables: dict[str, Any], caller: str) -> str:
        given = json.dumps(variables)
        why = self._refusals.why(name_of(template), caller, len(given))
        if why is not None:
            raise _refusal(why)
        answer = self._worker().ask(self._task(template, given))
        if answer is None:
            self._blame(template, caller, len(given))
            rule = f"it takes more than {self._seconds:g} seconds, or too much memory"
            raise _refusal(rule)
        if "error" in answer:
            raise _refusal(answer["error"])
        return answer["text"]

    def _task(self, template: str, given: str) -> str:
        return f"[{json.dumps(template)}, {given}, {self._most}]"

    def _blame(self, template: str, caller: str, size: int) -> None:
        """After a rendering that left its bounds: find out who is at fault."""
        name = name_of(template)
        is_sound = self._refusals.is_sound(name)
        if is_sound or self._worker().ask(self._task(template, json.dumps(ORDINARY))) is not None:
            self._refusals.blame_caller(name, caller, size)
            logger.warning("a caller's messages took an adapter's chat template out of bounds")
        else:
            self._refusals.blame_template(name)
            logger.warning("an adapter's chat template is out of bounds with any messages")

    def _worker(self) -> _Worker:
        """The one of this thread."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = _Worker(self._seconds)
            with self._lock:
                self._workers.append(worker)
        return worker


def _refusal(rule: str) -> RequestError:
    message = f"the adapter's chat template refuses these messages: {rule}"
    return RequestError(message, "messages")
