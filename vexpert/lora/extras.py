"""Kinds of things an adapter may hold beyond pairs of factors."""

from collections.abc import Iterable

from vexpert.errors import AdapterError

EXTRAS = {
    "bias": "lora_B has a bias (lora_bias)",
    "dora": "DoRA on Linear modules",
    "expert_dora": "DoRA on routed experts",
    "full_lm_head": "a full lm_head (modules_to_save)",
    "full_embedding": "a full embedding (modules_to_save)",
    "full_router": "a full router (modules_to_save)",
    "full_linear": "a full weight of another Linear (modules_to_save)",
    "full_bias": "full biases (bias='all' or 'lora_only')",
    "full_other": "full weights of norms or other modules (modules_to_save)",
    "tokens": "single rows of an embedding (trainable_token_indices)",
    "vocabulary": "a vocabulary of another size (added tokens)",
}
NOTHING: frozenset[str] = frozenset()


def require_supported(
    used: frozenset[str], supported: frozenset[str], examples: Iterable[tuple[str, str]]
) -> None:
    """AdapterError when an extra is used that the caller cannot apply.

    `examples`: (extra, where it is), of all extras.
    """
    assert supported <= EXTRAS.keys()
    missing = sorted(used - supported)
    if missing:
        meaning = "; ".join(EXTRAS[name] for name in missing)
        where = dict.fromkeys(place for extra, place in examples if extra in missing)
        raise AdapterError(
            f"the adapter needs {meaning}, which cannot be applied here (first: "
            f"{', '.join(list(where)[:3])}); merge the adapter into the base model, or train it "
            "without"
        )
