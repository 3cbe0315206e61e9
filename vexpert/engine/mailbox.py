"""What host and device leave for each other in the host's memory, step by step.

A captured step reads its rows there and writes its tokens there: no copy has to be waited for
between two steps. The places are used in turn; the device counts for itself (`turn`), so the host
must end each step that it has begun.
"""

import numpy as np
import torch

from vexpert.engine.host_copy import Landing

PLACES = 3  # a place is used again when its step has long been over


class Mailbox:
    """Places for steps of up to `most` rows, whose inputs are `size` int64."""

    def __init__(self, size: int, most: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        pin = self._is_cuda
        self.given = torch.zeros(PLACES, size, dtype=torch.int64, pin_memory=pin)
        self.told = torch.zeros(PLACES, most, dtype=torch.int64, pin_memory=pin)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = 0
        self._over: list[torch.cuda.Event | None] = [None] * PLACES

    def write(self, array: np.ndarray) -> None:
        """The next step's inputs [size] int64; may be written again before `end`."""
        place = self._turn % PLACES
        over = self._over[place]
        if over is not None:
            over.synchronize()
        self.given[place].numpy()[:] = array

    def end(self, count: int) -> Landing:
        """A step has been begun on the current stream; its first `count` tokens."""
        place = self._turn % PLACES
        self._turn += 1
        tokens = self.told[place, :count]
        if not self._is_cuda:
            return Landing([tokens.clone()], None)
        over = self._over[place] or torch.cuda.Event()
        over.record()
        self._over[place] = over
        return Landing([tokens], over)
