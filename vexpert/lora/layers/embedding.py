"""An embedding with LoRA: token id t is expert t, with one A column each and a common B."""

import torch
from torch import nn
from torch.nn import functional

from vexpert.errors import UnsupportedError
from vexpert.lora.layers.rows import SiteDelta
from vexpert.lora.types import EmbeddingTarget, LoraState
from vexpert.ops.backend import LoraBackend


class LoraEmbedding(nn.Embedding):
    """y = W[t] + B A[t]. Without a view, or if no active slot adapts it: exactly F.embedding.

    Build it with `wrap`: it takes over the weight of a loaded nn.Embedding.
    """

    delta: SiteDelta

    @classmethod
    def wrap(
        cls,
        embedding: nn.Embedding,
        target: EmbeddingTarget,
        state: LoraState,
        backend: LoraBackend,
    ) -> nn.Module:
        """A LoRA-aware module with the very weight of `embedding`.

        Raises UnsupportedError for a subclass, whose forward may do more than look up.
        """
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
            raise UnsupportedError(
                f"{target.path}: LoRA on a {type(embedding).__name__} is not supported, "
                "only on a plain nn.Embedding without max_norm"
            )
        assert embedding.weight.shape == (target.num_embeddings, target.embedding_dim), target.path
        module = cls.__new__(cls)
        module.__dict__.update(embedding.__dict__)
        module.delta = SiteDelta(target.site, state, backend)
        return module

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids [...] -> [..., D]; the ids, flattened, are the step's tokens."""
        y = functional.embedding(input, self.weight, self.padding_idx)
        view = self.delta.state.view
        if view is not None and self.delta.is_adapted(view):
            ids = input.reshape(-1)
            groups = self.delta.group(view, view.slots, ids)
            ones = torch.ones(ids.shape[0], 1, dtype=y.dtype, device=y.device)
            self.delta.add(view, groups, ones, y.view(-1, self.embedding_dim))
        return y
