"""Decode speed on the CPU: our base, our mixed adapters, transformers, and PEFT, in one run.

A random 68M-parameter MoE in float32 (hidden 256, 8 layers, 32 experts, top-4, intermediate 256,
vocabulary 32,000) and eight rank-8 adapters on experts and attention. Decode tokens/s is
batch * (LONG - 1) / (time of LONG tokens - time of one token), greedy, median of the rounds;
the contenders take turns within each round, so that a slow minute of the machine hits all.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: threads that spin for milliseconds at each barrier, OpenMP's default, slow every
# contender many times over as soon as anything else uses a core.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from vexpert import LLM, SamplingParams
from vexpert.bench.engine.files import ModelShape, write_tokenizer
from vexpert.checkout import commit

PROMPT = 64
LONG = 65
VOCAB = 32_000
SHAPE = ModelShape("cpu", 256, 256, 32, 4, 4, 2, 64, 8, VOCAB)
ADAPTERS = [f"adapter{i}" for i in range(8)]
Generate = Callable[[int, int], None]  # (batch, new tokens)


def make_config() -> Qwen3MoeConfig:
    config = SHAPE.config()
    config.max_position_embeddings = 512
    return config


def write_files(folder: Path) -> None:
    """Save the base model under `base` and one folder for each adapter."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(make_config())
    model.save_pretrained(folder / "base")
    write_tokenizer(folder / "base", VOCAB)
    for index, name in enumerate(ADAPTERS):
        torch.manual_seed(index)
        lora = LoraConfig(
            r=8,
            lora_alpha=16,
            init_lora_weights=False,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        base = Qwen3MoeForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        get_peft_model(base, lora).save_pretrained(folder / name)


def prompts(batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(2, VOCAB, (batch, PROMPT), generator=generator).tolist()


def transformers_generate(model: Any) -> Generate:
    def run(batch: int, tokens: int) -> None:
        ids = torch.tensor(prompts(batch))
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )

    return run


def vexpert_generate(llm: LLM, adapters: list[str] | None) -> Generate:
    def run(batch: int, tokens: int) -> None:
        names = [adapters[i % len(adapters)] for i in range(batch)] if adapters else None
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts(batch)], params, adapter=names)

    return run


def seconds(call: Generate, batch: int, tokens: int) -> float:
    start = time.perf_counter()
    call(batch, tokens)
    return time.perf_counter() - start


def decode_rate(call: Generate, batch: int) -> float:
    """Decode tokens/s of one round."""
    short = seconds(call, batch, 1)
    return batch * (LONG - 1) / (seconds(call, batch, LONG) - short)


def load(folder: Path) -> dict[str, Generate]:
    """Every contender. The prefix cache is off, so that each round computes its prompts."""
    hf = Qwen3MoeForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    hf.set_experts_implementation("grouped_mm")
    peft_base = Qwen3MoeForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    peft = PeftModel.from_pretrained(peft_base, folder / ADAPTERS[0])
    peft.set_adapter("default")
    options: dict[str, Any] = {
        "device": "cpu",
        "enable_prefix_caching": False,
        "max_num_seqs": 32,
    }
    plain = LLM(model=str(folder / "base"), enable_lora=False, **options)
    lora = LLM(model=str(folder / "base"), max_loras=8, max_lora_rank=8, **options)
    for name in ADAPTERS:
        lora.load_adapter(name, str(folder / name))
    return {
        "transformers grouped_mm": transformers_generate(hf.eval()),
        "vexpert base": vexpert_generate(plain, None),
        "vexpert LoRA server, base rows": vexpert_generate(lora, None),
        "vexpert 1 adapter": vexpert_generate(lora, ADAPTERS[:1]),
        "vexpert 8 adapters": vexpert_generate(lora, ADAPTERS),
        "PEFT 1 adapter": transformers_generate(peft.eval()),
    }


def measure(contenders: dict[str, Generate], batch: int, rounds: int) -> dict[str, float]:
    """Median decode tokens/s of each contender; PEFT runs at batch 1 alone (it is slow)."""
    names = [name for name in contenders if batch == 1 or not name.startswith("PEFT")]
    for name in names:
        contenders[name](batch, 2)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rates[name].append(decode_rate(contenders[name], batch))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = {}
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        with torch.inference_mode(False):
            write_files(folder)
            contenders = load(folder)
        for batch in options.batches:
            rows[batch] = measure(contenders, batch, options.rounds)
            base = rows[batch]["vexpert base"]
            print(f"batch {batch}")
            for contender, rate in rows[batch].items():
                print(f"  {contender:32s} {rate:9.1f} tokens/s  {rate / base:6.1%} of vexpert base")
    print(json.dumps({"commit": commit(), "threads": options.threads, "tokens_per_s": rows}))


if __name__ == "__main__":
    main()
