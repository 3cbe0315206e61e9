"""Two adapters and base in one batch equal three models whose weights PEFT has merged."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_models import VOCAB, random_sequences, relative_error, tiny_model
from test_models_exact import MOE
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from vexpert import LLM, SamplingParams

peft = pytest.importorskip("peft")

LIMIT = 1e-4  # of log-probabilities; both sides add some ten float32 products in other orders
ALL = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)


def save_base(model_type: str, folder: Path) -> None:
    tiny_model(model_type).save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def load_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def attention_linears(model: Any) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "attn" in name
    ]


def save_adapter(base: Path, folder: Path, seed: int, rank: int) -> Any:
    """A random adapter on attention and experts, as PEFT saves it; returns the merged model."""
    model = load_base(base)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=3 * rank,
        init_lora_weights=False,
        target_modules=attention_linears(model),
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight.data, std=0.15)
        adapted.save_pretrained(folder)
        return adapted.merge_and_unload()


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def served_log_probs(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> list[Any]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], ALL, adapter=names)
    tables = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        tables.append(
            torch.tensor([[row[t].logprob for t in range(len(row))] for row in rows if row])
        )
    return tables


@pytest.mark.parametrize("model_type", [*MOE, "glm4_moe_lite"])
@pytest.mark.parametrize("virtual_experts", [True, False], ids=["virtual", "classic"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mixed_batch_equals_merged_models(
    device: str, model_type: str, virtual_experts: bool, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_base(model_type, base)
    merged = {
        None: load_base(base),
        "one": save_adapter(base, tmp_path / "one", seed=1, rank=3),
        "two": save_adapter(base, tmp_path / "two", seed=2, rank=5),
    }
    llm = LLM(
        model=str(base),
        dtype="float32",
        device=device,
        max_num_batched_tokens=24,
        block_size=4,
        kv_cache_memory=1 << 20,
        lora_memory=1 << 26,
        lora_host_memory=1 << 26,
        lora_use_virtual_experts=virtual_experts,
    )
    for name in ("one", "two"):
        llm.load_adapter(name, str(tmp_path / name))
    prompts = random_sequences(6, 20, seed=5)
    names = ["one", None, "two", "one", "two", None]
    for got, ids, used in zip(served_log_probs(llm, prompts, names), prompts, names, strict=True):
        want = log_probs(merged[used], ids)
        assert relative_error(got, want) < LIMIT, used
    # what an adapter changes is far above the tolerance, so a row that got another's would show
    differences = [
        relative_error(log_probs(merged["one"], ids), log_probs(merged[other], ids))
        for ids in prompts[:1]
        for other in (None, "two")
    ]
    assert min(differences) > 100 * LIMIT
    del llm, merged
    gc.collect()
