"""The engine as coroutines see it: calls go to it as messages, its messages go to their requests.

Everything here runs in the event loop. When the engine ends, every request gets the reason at once,
and the engine is started again, with the adapters that it had, unless that happens too often.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vexpert.engine.validation import check_params
from vexpert.errors import RequestError, VexpertError
from vexpert.log import get_logger
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.info import AdapterPage, ListedNames
from vexpert.server.beside import beside
from vexpert.server.deltas import read_plain, read_update
from vexpert.server.engine_link import Link
from vexpert.server.heartbeat import Heartbeat
from vexpert.server.interface import EngineHost, LoraModule
from vexpert.server.progress import (
    EngineFailedError,
    Failure,
    OverloadedError,
    ShuttingDownError,
    Sink,
    Tracker,
)
from vexpert.server.recorder import Recorder
from vexpert.server.restarts import Restarts
from vexpert.server.wire import params_fields, read_error, read_info, read_stats

if TYPE_CHECKING:
    from vexpert.engine.outputs import EngineStats
    from vexpert.engine.sampling_params import SamplingParams
    from vexpert.lora.info import AdapterInfo

logger = get_logger(__name__)
QUEUE_SECONDS = 90  # for a constraint to be compiled, with those before it
LAST_WORDS = 10.0  # seconds between the end of the connection and that of the engine
STOP_SECONDS = 5.0  # for the engine to end by itself
KILL_SECONDS = 60.0  # for a killed engine to be gone; one that waits for a dead device may stay
MAX_LOADS = 256  # that run or wait


class AsyncEngine:
    """Serves coroutines of one event loop from the engine of a host."""

    def __init__(
        self,
        host: EngineHost,
        recorder: Recorder,
        max_queue_len: int | None = None,
        keep_alive: float = 15.0,
        max_restarts: int = 0,
        step_timeout: float | None = None,
    ) -> None:
        """`max_queue_len`: sequences accepted beyond those of one step; None: any number.

        `max_restarts`: of the engine, see `Restarts`. `step_timeout`: seconds after which a
        step hangs, and the engine is ended; None: it is never asked.
        """
        self.facts = host.facts
        self.keep_alive = keep_alive  # seconds
        self.num_sequences = 0  # accepted and not ended
        self.recorder = recorder
        self.failure: EngineFailedError | None = None  # why nothing can be answered now
        self.is_restarting = False
        self.on_failure: Callable[[], None] | None = None  # the engine will not start again
        self._restarts = Restarts(max_restarts)
        self._host = host
        self._most = None if max_queue_len is None else self.facts.max_num_seqs + max_queue_len
        self._modules = {module.name: module for module in host.modules}
        self._step_timeout = step_timeout
        self._heartbeat: Heartbeat | None = None  # of the engine that runs
        self._loads = 0  # that run or wait
        self._is_stopping = False
        self._is_hurried = False  # the engine is killed, not asked to end
        self._link: Link | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._keys: dict[str, int] = {}  # by request id
        self._trackers: dict[int, Tracker] = {}  # by key

    async def start(self) -> None:
        """Connect to the engine; its messages go to the running event loop."""
        assert self._link is None, "started twice"
        self._link = await self._open()
        self._supervisor = asyncio.ensure_future(self._supervise())

    async def stop(self) -> None:
        """Abort what runs, end the engine, and wait for it."""
        assert self._link is not None, "not started"
        assert self._supervisor is not None, "not started"
        self._is_stopping = True
        may_end_well = not (self._is_hurried or self.is_restarting or self.doubt)
        link = self._link
        if self.failure is None:
            link.post("stop")
        self._fail("the server is shutting down")
        link.close()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        if not (may_end_well and await self._is_gone(STOP_SECONDS)):
            self._host.kill()
            await self._is_gone(KILL_SECONDS)

    def hurry(self) -> None:
        """Let `stop` end the engine at once, the one that waits for its end too."""
        self._is_hurried = True
        if self._is_stopping:
            self._host.kill()

    def kill(self) -> None:
        """End the engine at once, when this process is to end too; for any thread."""
        self._host.kill()

    @property
    def restarts(self) -> int:
        """Of the engine, since the server started."""
        return self._restarts.count

    @property
    def doubt(self) -> str | None:
        """Why the engine that runs may hang; None while it answers."""
        return None if self._heartbeat is None else self._heartbeat.doubt

    def check_room(self, count: int = 1) -> None:
        """OverloadedError if `count` more sequences are too many now, RequestError if ever."""
        if self._most is not None and count > self._most:
            message = f"{count} completions in one request: at most {self._most}; ask for fewer"
            raise RequestError(message, "n")
        if self._most is not None and self.num_sequences + count > self._most:
            message = (
                f"{self.num_sequences} sequences run or wait, and {self._most} may; try again later"
            )
            raise OverloadedError(message)

    async def prepare(self, params: "SamplingParams") -> None:
        """Compile the constraint of `params` beside the steps. Raises RequestError.

        OverloadedError where too many others wait before it. If the caller is cancelled, it is
        not compiled.
        """
        if params.constraint is None:
            return
        link, key = self._connected(), next(self._numbers)
        done = link.call("call", "prepare", [params_fields(params), key])
        try:
            await asyncio.wait_for(done, QUEUE_SECONDS)
        except TimeoutError:  # the engine bounds the time of each alone
            message = f"the constraint waits for {QUEUE_SECONDS} seconds behind others"
            raise OverloadedError(f"{message}; try again later") from None
        finally:
            if done.cancelled():
                link.post("drop", key)

    def cut(self, message: str) -> None:
        """Abort every request; each gets a ShuttingDownError that says `message`."""
        for tracker in list(self._trackers.values()):
            self.abort(tracker.request_id)
            tracker.sink(ShuttingDownError(message))

    async def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: "SamplingParams",
        *,
        adapter: str | None,
        every_step: bool,
        sink: Sink,
        version: int | None = None,
    ) -> None:
        """Queue a request; `sink` gets its updates in the event loop, the last one finished.

        `version`: of the adapter that the prompt was made for; None: of any. Raises what the engine
        raises. If the caller is cancelled meanwhile, the request is aborted.
        """
        assert request_id not in self._keys, request_id
        link = self._connected()
        self.check_room(params.n)
        check_params(params, self.facts.vocab_size)  # what passes fits into a message
        key, arrival = next(self._numbers), time.perf_counter()
        tracker = Tracker(
            *(request_id, adapter, len(prompt_token_ids), params.n, sink), arrival=arrival
        )
        self._keys[request_id], self._trackers[key] = key, tracker
        self.num_sequences += params.n
        try:
            await link.call(
                *("add", key, request_id, prompt, prompt_token_ids),
                *(params_fields(params), adapter, version, every_step),
            )
        except asyncio.CancelledError:
            self.abort(request_id)
            raise
        except Exception:  # refused or lost, raised on: no update will come
            self._forget(key)
            raise

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step; harmless when it is finished or unknown."""
        key = self._keys.get(request_id)
        if key is None:
            return
        tracker = self._trackers[key]
        self._forget(key)
        self._connected().post("abort", key)
        self.recorder.finished(tracker, tracker.all_reasons(), time.perf_counter())

    async def load_adapter(
        self, name: str, path: str, *, lazy: bool = False, **options: Any
    ) -> "AdapterInfo":
        """Load an adapter beside the steps. Raises AdapterError, or OSError.

        `lazy`: it is only registered. Options: lora_B_layout, load_inplace, pinned.
        """
        info = read_info(await self._load(name, path, lazy, options))
        kept = {key: value for key, value in options.items() if key != "load_inplace"}
        self._modules[name] = LoraModule(name, path, lazy=lazy, **kept)
        return info

    async def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Unload an adapter. Raises AdapterNotFoundError."""
        await self._call("unload", name, drain_seconds)  # however many loads hang
        self._modules.pop(name, None)

    async def adapter_folder(self, name: str) -> str | None:
        """Folder of the newest version of an adapter; None if there is none."""
        folder: str | None = await self._call("adapter_folder", name)
        return folder

    async def adapter_template(self, name: str) -> ChatTemplate:
        """The chat template that an adapter was loaded with. Raises AdapterError."""
        return ChatTemplate(*await self._call("adapter_template", name))

    async def adapter_page(
        self, after: str | None, most: int, states: Collection[str] = (), part: str = ""
    ) -> AdapterPage:
        """Versions of the first `most` names behind `after`, or of fewer.

        With a state of `states`, where there are any, and `part` in the name, in lower case.
        """
        infos, last = await self._call("adapter_page", after, most, [*states], part)
        return AdapterPage([read_info(fields) for fields in infos], last)

    async def adapters_named(self, names: Collection[str]) -> "list[AdapterInfo]":
        """Every version of these adapters, errored and draining ones too."""
        return [read_info(fields) for fields in await self._call("adapters_named", [*names])]

    async def some_adapter_names(self, most: int) -> ListedNames:
        """The first `most` names of adapters that requests may use."""
        return ListedNames(*await self._call("adapter_names", most))

    async def stats(self) -> "EngineStats":
        """The engine's statistics, taken between two steps."""
        return read_stats(await self._call("stats"))

    async def check_integrity(self) -> None:
        """Assert in the engine, between two steps, that everything it keeps agrees."""
        await self._call("check_integrity")

    # Messages.

    def _connected(self) -> Link:
        if self.failure is not None:
            raise self.failure
        assert self._link is not None, "not started"
        return self._link

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._connected().call("call", method, arguments)

    async def _load(self, *arguments: Any) -> Any:
        if self._loads >= MAX_LOADS:
            raise OverloadedError(f"{MAX_LOADS} loads run or wait; try again later")
        self._loads += 1
        try:
            return await self._call("load", *arguments)
        finally:
            self._loads -= 1

    def _step(self, entries: list[Any]) -> None:
        now = time.perf_counter()
        for key, *entry in entries:
            tracker = self._trackers.get(key)
            if tracker is None:
                continue  # aborted meanwhile
            if len(entry) == 2:
                text, tokens = entry
                self.recorder.stepped(tracker, len(tokens), now)
                tracker.sink(read_plain(text, tokens, tracker))
                continue
            new_tokens, finished, error, fields = entry
            self.recorder.stepped(tracker, new_tokens, now)
            told: Failure | Any = read_error(error) if error is not None else None
            if fields is not None:
                told = read_update(fields, finished, tracker)
            if finished:
                self._forget(key)
                self.recorder.finished(tracker, tracker.all_reasons(), now)
            if told is not None:
                tracker.sink(told)

    def _forget(self, key: int) -> None:
        tracker = self._trackers.pop(key, None)
        if tracker is not None:
            del self._keys[tracker.request_id]
            self.num_sequences -= tracker.num_sequences

    # The life of the engine.

    async def _open(self) -> Link:
        # `connect` waits for an engine that starts.
        sock = await beside(self._host.connect)
        return await Link.open(sock, self._step, self._host.kill)

    async def _supervise(self) -> None:
        """Start the engine anew whenever it ends, within the limit; then call `on_failure`."""
        how = await self._ended()
        while self._restarts.may_begin():
            self._fail(f"{how}; it is started again", is_restarting=True)
            logger.error("%s; it is started again", how)
            if not await self._is_gone(KILL_SECONDS):  # its memory is not free
                how = f"{how}; its process does not end"
                break
            try:
                await beside(partial(self._host.launch, [*self._modules.values()], True))
                self._link = await self._open()
            except (EngineFailedError, OSError) as error:
                self._host.kill()  # it may hang
                how = str(error)
                continue
            except VexpertError as error:
                how = f"the engine does not start again: {error}"
                break
            self.failure, self.is_restarting = None, False
            logger.info("the engine is ready again")
            how = await self._ended()
        self._fail(f"{how}; the server ends")
        logger.error("%s; the server ends", how)
        if self.on_failure is not None:
            self.on_failure()

    async def _ended(self) -> str:
        """Wait for the end of the engine; how it came."""
        assert self._link is not None, "not started"
        link = self._link
        ended = asyncio.ensure_future(beside(self._host.wait))
        lost = asyncio.ensure_future(link.lost.wait())
        hung = asyncio.ensure_future(self._hung(link))
        try:
            await asyncio.wait({ended, lost, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not hung.done():
                # Each follows the other, unless something is odd; a large process ends slowly.
                await asyncio.wait({ended, lost}, timeout=LAST_WORDS)
        finally:
            hung.cancel()
        self._heartbeat = None
        self._host.kill()
        link.close()
        how = ended.result() if ended.done() else "the engine's connection ended"
        return hung.result() if hung.done() else link.last_words or how

    async def _hung(self, link: Link) -> str:
        """Wait for the engine to hang; how it does."""
        if self._step_timeout is None:
            await asyncio.Event().wait()
        assert self._step_timeout is not None
        self._heartbeat = Heartbeat(link, self._step_timeout)
        return await self._heartbeat.until_hung()

    async def _is_gone(self, seconds: float) -> bool:
        """Wait until the engine has ended, at most `seconds`; whether it has."""
        try:
            await asyncio.wait_for(beside(self._host.wait), seconds)
        except TimeoutError:
            return False
        return True

    def _fail(self, reason: str, is_restarting: bool = False) -> None:
        """Tell `reason` to all that wait, and to all that come until the engine is there again."""
        failure = self.failure = EngineFailedError(reason)
        self.is_restarting = is_restarting
        if self._link is not None:
            self._link.fail(failure)
        trackers, now = list(self._trackers.values()), time.perf_counter()
        self._trackers, self._keys, self.num_sequences = {}, {}, 0
        for tracker in trackers:
            self.recorder.finished(tracker, tracker.all_reasons(), now)
            tracker.sink(failure)
