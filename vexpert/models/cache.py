"""The object that models take for transformers' cache: what they update it with passes through."""

import torch

from vexpert.models.attention import StepContext


class StepCache:
    """Answers what a model asks of a cache during one step; attention itself reads and writes."""

    is_compileable = False

    def __init__(self, context: StepContext) -> None:
        self.context = context

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value as they are."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[T] int64: models add it to arange(T) for positions, and so get each token's own."""
        positions = self.context.running.step.positions
        return positions - torch.arange(positions.shape[0], device=positions.device)
