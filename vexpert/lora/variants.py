"""What adapter_config.json says that makes an adapter more than W x + s B A x: refused here."""

from typing import Any

from vexpert.config import shown
from vexpert.errors import AdapterError

# Initialisations that change the base weights: B A alone is then not the trained difference.
BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Those that leave them as they are, in PEFT up to 0.21; true, false and null too.
PLAIN = ("gaussian", "eva", "orthogonal", "mica")

MERGE = "merge the adapter into the base model"
RETRAIN = "PEFT cannot merge it either: train it as plain LoRA"

# Variants whose forward pass is another one: what it is, and what to do. Any value but null, false
# and nothing is refused.
VARIANTS = {
    "use_qalora": ("QALoRA pools the input of lora_A", RETRAIN),
    "use_bdlora": ("block-diagonal LoRA", MERGE),
    "alora_invocation_tokens": ("activated LoRA starts at its invocation tokens", RETRAIN),
    "arrow_config": ("Arrow routes between several adapters", "serve those adapters one by one"),
    "kasa_config": ("KaSA changes the base weights", MERGE),
    "monteclora_config": ("MonteCLoRA samples its factors", MERGE),
    "velora_config": ("VeLoRA", MERGE),
    "layer_replication": ("the adapter is for a model with replicated layers", RETRAIN),
    "megatron_config": ("Megatron's parallel layers", MERGE),
}


def check_variant(raw: dict[str, Any]) -> None:
    """AdapterError for another kind of adapter than LoRA, and for variants of LoRA."""
    _check_type(raw)
    for name, (meaning, remedy) in VARIANTS.items():
        if raw.get(name) not in (None, False, [], {}):
            raise _refused(f"{name}={shown(raw[name])}: {meaning}; not supported: {remedy}")
    _check_init(raw.get("init_lora_weights"))


def _refused(text: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {text}")


def _check_type(raw: dict[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind == "LORA":
        return
    if kind is None:
        raise _refused('peft_type is missing: if these are LoRA factors, add "peft_type": "LORA"')
    if isinstance(kind, str) and kind.upper() == "LORA":
        raise _refused(f'peft_type={shown(kind)}: write it in capitals, "peft_type": "LORA"')
    raise _refused(
        f"peft_type={shown(kind)}: only LORA adapters can be served; merge this one into the base "
        "model or train it as LoRA"
    )


def _check_init(init: Any) -> None:
    """Refuse initialisations that change the base weights, or of which that is not known."""
    if not isinstance(init, str) or init.lower() in PLAIN or not init:
        return
    said = f"init_lora_weights={shown(init)}"
    if not init.lower().startswith(BASE_CHANGING):
        raise _refused(
            f"{said}: an initialisation that this version does not know, and that may change the "
            f"base weights; if it does not, write true in its place, else {MERGE}"
        )
    changed = f"{said} changed the base weights, so the factors are not the trained difference"
    if init.lower() == "loftq":
        raise _refused(
            f"{changed}; PEFT has no conversion of LoftQ: {MERGE} that LoftQ made, and serve that"
        )
    raise _refused(
        f"{changed}; convert it to plain LoRA: save_pretrained with "
        "path_initial_model_for_weight_conversion, the folder of the adapter as it was saved "
        f"before training. Without that one: {MERGE} as the initialisation left it"
    )
