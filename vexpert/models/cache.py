"""The object that models take for transformers' cache: it hands latents to the paged cache."""

import torch

from vexpert.models.attention import AttentionLayer, StepContext


class StepCache:
    """Answers what a model asks of a cache during one step.

    Keys and values pass through, since attention itself writes them; latents are written here
    and the whole context comes back.
    """

    is_compileable = False

    def __init__(self, context: StepContext, latent_layers: dict[int, AttentionLayer]) -> None:
        self.context = context
        self.latent_layers = latent_layers  # by the layer_idx that the module passes

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent layer: write key and value [1, 1, T, d], return the context of the step."""
        layer = self.latent_layers.get(layer_idx)
        if layer is None:
            return key, value
        layer.write(key, value)
        return layer.latent_context()

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """[T] int64: models add it to arange(T) for positions, and so get each token's own."""
        positions = self.context.running.step.positions
        return positions - torch.arange(positions.shape[0], device=positions.device)
