"""Why a request has no next token."""

import torch

from vexpert.engine.request import Request, Sequence


def no_token_error(sequence: Sequence, raw_logits: torch.Tensor) -> str:
    """Cause and remedy; `raw_logits` [V] are the model's, before any adjustment.

    They are only looked at if the sequence adjusts them: steps that do not may overlap with the
    next, which overwrites them.
    """
    if sequence.sampling.is_adjusted and bool(raw_logits.max().isfinite()):
        return (
            "the sampling options leave no token with a finite logit: relax min_tokens with"
            " stop_token_ids, logit_bias, the penalties or structured_outputs"
        )
    return not_finite_error(sequence.request)


def not_finite_error(request: Request) -> str:
    """Cause and remedy where the model's own logits are NaN or infinite."""
    if request.adapter is None:
        return "the base model gives no finite logits: check its weights and dtype"
    return (
        f"adapter {request.adapter.name!r}: its weights give no finite logits; check them for NaN,"
        " infinite and huge values, and load it again"
    )
