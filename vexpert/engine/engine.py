"""The engine: requests in, tokens out, one step at a time."""

import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from vexpert.config import EngineConfig
from vexpert.engine import boot
from vexpert.engine.adapters import AdapterSource
from vexpert.engine.capture import Capturer
from vexpert.engine.completion import Completer, request_output
from vexpert.engine.detokenizer import Detokenizer
from vexpert.engine.failure import no_token_error, not_finite_error
from vexpert.engine.flight import Flight, may_overlap
from vexpert.engine.grammar import Grammars, Matcher
from vexpert.engine.grammar_probe import always
from vexpert.engine.logprobs import token_logprobs
from vexpert.engine.outputs import EngineStats, RequestOutput
from vexpert.engine.request import Request, Sequence, State
from vexpert.engine.runner import Runner, StepResult
from vexpert.engine.sampler import NO_TOKEN, Sampled, Sampler
from vexpert.engine.sampler_state import SamplerState
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.scheduler import Chunk
from vexpert.engine.validation import check_params, check_prompt
from vexpert.engine.warmup import WarmUp, warm_up
from vexpert.errors import AdapterNotFoundError, RequestError
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.listing import Listing
from vexpert.lora.types import AdapterInfo, AdapterRef
from vexpert.models.types import ServedModel

STALL_PAUSE = 0.001  # seconds to wait when nothing can run, e.g. until an adapter is copied


class Engine:
    """Serves requests of the base model and of adapters in one running batch.

    `add_request`, `abort`, `step` and `stats` belong to one thread; adapters may be loaded and
    unloaded from others. `model`, `tokenizer` and `adapters` are built from `config` unless given.
    `capturer` makes graphs of decode steps where the device is not a GPU: for tests. `overlap`:
    whether steps are committed while the next one runs; None: on a GPU.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: ServedModel | None = None,
        tokenizer: Any = None,
        adapters: AdapterSource | None = None,
        capturer: Capturer | None = None,
        overlap: bool | None = None,
    ) -> None:
        self.config = config
        weights = boot.check_lora_options(config)
        model = boot.load_served_model(config) if model is None else model
        self.tokenizer = boot.load_model_tokenizer(config) if tokenizer is None else tokenizer
        self.model = model
        self.model_info = model.info
        self.max_model_len = boot.decide_max_model_len(config, model.info)
        self._adapters = boot.make_adapters(config, model) if adapters is None else adapters
        graphs = boot.make_graphs(config, model, self._adapters, self.max_model_len, capturer)
        reserved = boot.graph_reserve(graphs, config)
        cache = boot.make_cache(config, model, self.max_model_len, reserved)
        tokens_per_step = config.tokens_per_step(model.info.device.type)
        self.scheduler = boot.make_scheduler(
            config, self._adapters, cache.num_blocks, tokens_per_step, weights
        )
        self._runner = Runner(model, self._adapters, config.block_size, graphs)
        self._sampler = Sampler(config.seed)
        self._overlaps = model.info.device.type == "cuda" if overlap is None else overlap
        self._flight: Flight | None = None  # the step under way, if the last call left one
        self._stepper: int | None = None  # thread that steps, or is about to
        eos = model.info.eos_token_ids
        self._grammars = Grammars(self.tokenizer, model.info.vocab_size, eos)
        self._completer = Completer(self.tokenizer, eos, self.max_model_len)
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._prompt_tokens = self._generation_tokens = self._steps = 0
        if model.info.device.type == "cuda" or capturer is not None:
            sizes = tokens_per_step, config.max_num_seqs
            extent = WarmUp(cache.num_blocks, config.block_size, *sizes, config.warm_up)
            warm_up(model, graphs, self._sampler, extent)
        boot.log_budgets(model, config, cache, self.max_model_len, self._adapters)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        adapter: str | None = None,
        version: int | None = None,
    ) -> None:
        """Queue a request; `prompt` is only handed back. Nothing is changed if it raises.

        `version`: of the adapter that the prompt was made for; None: of any. Raises RequestError
        for a bad prompt, option or a known id, AdapterNotFoundError for an unknown adapter,
        AdapterGoneError for one that cannot be read, AdapterReplacedError for a `version` that is
        not the newest. The output ends at max_model_len, whatever max_tokens allows.
        """
        self._stepper = threading.get_ident()
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use: choose another")
        vocab_size = self.model_info.vocab_size
        tokens = check_prompt(prompt_token_ids, vocab_size, self.max_model_len)
        check_params(params, vocab_size)
        wanted = params.constraint
        matchers = [
            None if wanted is None else self._grammars.matcher(wanted) for _ in range(params.n)
        ]
        request = Request(request_id, prompt, tokens, params)
        request.sequences = [
            self._new_sequence(request, index, matcher) for index, matcher in enumerate(matchers)
        ]
        if adapter is not None:  # last: whatever raises before it holds nothing
            request.adapter = self._adapters.hold_newest(adapter, version)
        self._requests[request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def is_quick(self, params: SamplingParams) -> bool:
        """Whether `prepare` needs no trial that may take long; in any thread."""
        return params.constraint is None or self._grammars.is_quick(params.constraint)

    def prepare(self, params: SamplingParams, is_wanted: Callable[[], bool] = always) -> None:
        """Compile what `params` constrain the output to, so that `add_request` finds it done.

        May run beside `step`, in any thread. Raises RequestError, also soon after `is_wanted` says
        that nobody waits for it any more.
        """
        if params.constraint is not None:
            self._grammars.compile(params.constraint, is_wanted)

    def adapter_folder(self, name: str) -> str | None:
        """Folder of the newest version of an adapter, None if there is none; in any thread."""
        versions = self._adapters.listing.named([name])
        return next((info.path for info in versions if info.state != "draining"), None)

    def adapter_template(self, name: str, may_read: bool = True) -> ChatTemplate | None:
        """The chat template that the newest version of an adapter was loaded with; in any thread.

        None: it is not read yet, and `may_read` is not set. Without text, and of version 0, for an
        unknown adapter.
        """
        try:
            return self._adapters.chat_template(name, may_read)
        except AdapterNotFoundError:
            return ChatTemplate()

    def _new_sequence(self, request: Request, index: int, matcher: Matcher | None) -> Sequence:
        params, tokens = request.params, request.prompt_token_ids
        sampling = SamplerState(params, tokens, self.model_info.eos_token_ids, index, matcher)
        detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)
        return Sequence(request, index, next(self._arrivals), sampling, detokenizer)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free what it holds; False if it is unknown or has finished.

        No later step returns an output for it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        self._forget(request)
        return True

    def _end(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                self.scheduler.finish(sequence)

    def _fail(self, request: Request, error: str) -> None:
        """End one request by an error of its own; the next output of it says so."""
        request.error = error
        self._end(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        if request.adapter is not None:
            self._adapters.drop(request.adapter)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit; the state of each request that gained a token or failed.

        On a GPU a step is committed while the next one runs: its outputs come a call later, unless
        the next step depends on them.
        """
        self._stepper = threading.get_ident()
        ended = self._adapters.advance(is_idle=not self.scheduler.running)
        outputs = self._fail_users(ended) if ended else []
        with torch.inference_mode():
            if self._flight is not None and not may_overlap(self._flight, self.scheduler):
                outputs += self._land()
            chunks = self.scheduler.schedule()
            flight = self._launch(chunks) if chunks else None
            if self._flight is not None:
                outputs += self._land()
            elif flight is None and self._requests and not outputs:
                time.sleep(STALL_PAUSE)
            self._flight = flight
            return outputs if self._overlaps or flight is None else outputs + self._land()

    def _launch(self, chunks: list[Chunk]) -> Flight:
        """Begin a step on the device; the host waits for nothing but what sampling asks for."""
        under_way = None if self._flight is None else self._flight.chosen
        result = self._runner.run(chunks, under_way)
        sampling = None
        if result.sampled:
            rows = [sequence.sampling for sequence in result.sampled]
            sampling = self._sampler.begin(result.sample_logits, rows, result.largest)
        for chunk in chunks:
            self.scheduler.commit(chunk)
        for row, sequence in enumerate(result.sampled):
            sequence.expect(row, self.max_model_len)
        return Flight(chunks, result, sampling)

    def _land(self) -> list[RequestOutput]:
        """Wait for the step under way and commit it."""
        flight, self._flight = self._flight, None
        assert flight is not None
        return self._commit(flight)

    def _fail_users(self, ended: dict[AdapterRef, str]) -> list[RequestOutput]:
        """End the requests of adapters that cannot serve them any more."""
        users = [r for r in self._requests.values() if r.adapter is not None and r.adapter in ended]
        for request in users:
            assert request.adapter is not None
            request.lost_adapter = True
            self._fail(request, ended[request.adapter])
        return [self._output(request) for request in users]

    def _commit(self, flight: Flight) -> list[RequestOutput]:
        self._steps += 1
        touched = {request.id: request for request in self._add_prompt_logprobs(flight.result)}
        for request in touched.values():
            self._fail(request, not_finite_error(request))
        if flight.sampling is not None:
            alive = [s for s in flight.sampled if s.state is not State.FINISHED]
            touched |= {s.request.id: s.request for s in alive}
            self._append_tokens(flight, flight.sampling.wait())
        return [self._output(request) for request in touched.values()]

    def _append_tokens(self, flight: Flight, sampled: Sampled) -> None:
        for row, (sequence, token, logprobs) in enumerate(
            zip(flight.sampled, *sampled, strict=True)
        ):
            if sequence.state is State.FINISHED:
                continue  # it ended, or its request failed, after this step had begun
            if token == NO_TOKEN:
                error = no_token_error(sequence, flight.result.sample_logits[row])
                self._fail(sequence.request, error)
                continue
            overrun = sequence.sampling.overrun()  # by the mask; to accept would take longer
            if overrun is not None:
                self._fail(sequence.request, overrun)
                continue
            self._count(sequence.request)
            if self._completer.append(sequence, token, logprobs):
                self.scheduler.finish(sequence)
            elif (overrun := sequence.sampling.overrun()) is not None:
                self._fail(sequence.request, overrun)
            elif sequence.state is State.RUNNING:
                self.scheduler.publish(sequence)

    def _count(self, request: Request) -> None:
        """One more output token; with a request's first, its prompt is processed."""
        self._generation_tokens += 1
        if not request.prompt_is_done:
            request.prompt_is_done = True
            self._prompt_tokens += len(request.prompt_token_ids)

    def _output(self, request: Request) -> RequestOutput:
        output = request_output(request)
        if output.finished:
            self._forget(request)
        return output

    def _add_prompt_logprobs(self, result: StepResult) -> list[Request]:
        """Extend the rows of each request; the requests whose prompt gives logits not finite."""
        failed = []
        row = 0
        for sequence, first, count in result.prompt_rows:
            request = sequence.request
            if request.id not in self._requests:
                row += count
                continue  # aborted after this step had begun
            assert request.prompt_logprobs is not None
            logits = result.prompt_logits[row : row + count]
            tokens = request.prompt_token_ids[first + 1 : first + 1 + count]
            chosen = torch.tensor(tokens, device=logits.device)
            wanted = [request.params.prompt_logprobs or 0] * count
            table = token_logprobs(logits, chosen, wanted)
            if any(math.isnan(logprobs.entries[0][1]) for logprobs in table):
                failed.append(request)
                table = []
            request.prompt_logprobs += [self._completer.logprob_row(each) for each in table]
            row += count
        return failed

    def load_adapter(self, name: str, path: str | None = None, **options: Any) -> AdapterInfo:
        """Load an adapter and wait for it; from any thread. AdapterError says why it is refused.

        From the folder `path`, or from `tensors=` with `config=`. Other options: lora_B_layout,
        load_inplace, pinned; see `AdapterManager.load`. In the thread that steps it is refused
        where requests fill host memory with adapters that wait for the device: they need steps.
        """
        me = threading.get_ident()
        return self._adapters.load(name, path, steps_go_on=lambda: self._stepper != me, **options)

    def register_adapter(self, name: str, path: str, **options: Any) -> AdapterInfo:
        """Serve the folder `path`, to be read at its first use; options as for `load_adapter`."""
        return self._adapters.register(name, path, **options)

    def unload_adapter(self, name: str, *, drain_seconds: float | None = None) -> None:
        """Forget an adapter; its running requests finish, or end after `drain_seconds`."""
        self._adapters.unload(name, drain_seconds=drain_seconds)

    def adapters(self) -> list[AdapterInfo]:
        """All adapters, also those that drain or are errored. From any thread."""
        return self._adapters.list()

    @property
    def adapter_listing(self) -> Listing:
        """The same in parts; in any thread."""
        return self._adapters.listing

    def stats(self) -> EngineStats:
        """One look at queues, blocks and counters."""
        scheduler = self.scheduler
        running, waiting = _by_adapter(scheduler.running), _by_adapter(scheduler.waiting)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            running_adapters=tuple(sorted(running)),
            waiting_adapters=tuple(sorted(waiting)),
            running_by_adapter=running,
            waiting_by_adapter=waiting,
            max_loras=self._adapters.num_slots,
            adapters=self._adapters.usage(),
            kv_blocks_total=scheduler.pool.num_blocks,
            kv_blocks_used=scheduler.pool.num_used,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            preemptions=scheduler.num_preemptions,
            steps=self._steps,
        )

    def check_integrity(self) -> None:
        """Assert that queues, blocks, slots and requests agree; nothing is held when idle."""
        self.scheduler.check_integrity()
        self._adapters.check_integrity()
        queued = {s.request.id for s in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._requests), "a request without sequences, or the reverse"
        if not self._requests:
            assert self.scheduler.pool.num_used == 0, "blocks in use without a request"


def _by_adapter(sequences: list[Sequence]) -> dict[str, int]:
    return Counter(s.adapter.name for s in sequences if s.adapter is not None)
