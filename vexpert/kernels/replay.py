"""Whole operations launched again without their Python: checks, plans, views, allocations.

A *program* is what an operation launched, with every address written as one of its inputs, or as an
offset in one block of memory that holds all intermediates. Layers of a model run one program, each
with its own inputs. What is required of an operation, and checked while it is recorded:

- it launches kernels on tensors that are inputs, or that it made itself and nothing else holds;
- besides, it makes and views tensors, and multiplies them by `functional.linear` in inference mode;
- what it launches depends on the key, and on dtypes, shapes and strides of its inputs. So a program
  is only trusted when a second recording, usually that of the next layer, says the same; or when
  a trusted one differs in whole numbers alone: the same operation on inputs of other lengths.

An operation that fails a check is run as it is, always; the log says why, at DEBUG. Inside a
recording of another operation it is run, and becomes a part of that one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from triton.runtime.driver import driver

from vexpert.kernels.launch import is_recording, is_watched
from vexpert.kernels.replay_program import Program, Tensors
from vexpert.kernels.replay_record import record
from vexpert.log import get_logger

logger = get_logger(__name__)

MOST_PROGRAMS, MOST_WIRINGS = 256, 1024


@dataclass
class _Entry:
    owner: object  # kept: its identity is in the key
    program: Program | None  # None: never
    is_trusted: bool = False


class Replays:
    """The programs of the operation `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: dict[Hashable, _Entry] = {}
        self._wirings: set[Hashable] = set()  # of trusted programs

    def __call__(
        self,
        owner: object,
        key: Hashable,
        inputs: Sequence[torch.Tensor],
        run: Callable[[], Tensors],
        unsaid: int | None = None,
    ) -> Tensors:
        """The results of `run()`, which reads and changes nothing but `inputs`.

        `key`, and the very object `owner`: what it depends on besides. `unsaid`: of so many of the
        first inputs the key does not say dtypes, shapes and strides; None: of all.
        """
        first = inputs[0]
        if not first.is_cuda or is_watched() or is_recording():
            return run()
        addresses = [tensor.data_ptr() for tensor in inputs]
        full = (
            id(owner),
            key,
            driver.active.get_current_device(),
            tuple([(t.dtype, t.shape, t.stride()) for t in inputs[:unsaid]]),
            tuple([address & 15 for address in addresses]),
        )
        entry = self._entries.get(full)
        if entry is not None and entry.is_trusted and len(set(addresses)) == len(addresses):
            if entry.program is None:
                return run()
            return entry.program.replay(inputs, addresses, first.device)
        return self._learn(full, owner, inputs, run)

    def _learn(
        self,
        full: Hashable,
        owner: object,
        inputs: Sequence[torch.Tensor],
        run: Callable[[], Tensors],
    ) -> Tensors:
        """Run it and record."""
        entry = self._entries.get(full)
        if entry is not None and entry.is_trusted:
            return run()
        results, found = record(inputs, run)
        if entry is not None and found != entry.program:
            found = "two recordings differ"
        if isinstance(found, str):
            logger.debug("%s is not replayed: %s", self.name, found)
            program, is_trusted = None, True
        else:
            program, is_trusted = found, entry is not None or found.wiring in self._wirings
        if program is not None and is_trusted and len(self._wirings) < MOST_WIRINGS:
            self._wirings.add(program.wiring)
        if entry is None and len(self._entries) >= MOST_PROGRAMS:
            self._entries.clear()
        self._entries[full] = _Entry(owner, program, is_trusted)
        return results
