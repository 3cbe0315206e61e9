"""Training loop and greedy evaluation, for the base model and the adapters alike."""

import json
import math
import random
import shutil
import time
from pathlib import Path
from typing import TypeAlias

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
)

from demo.recipes import BASE_NAME, RECIPES, Recipe, base_config
from demo.tasks import MAX_LETTERS, TASKS, ConversationSampler, Task, held_out_words

WARMUP_STEPS = 50
EVALUATE_EVERY = 250
VALIDATION_SEED = 1
Model: TypeAlias = PreTrainedModel | PeftModel


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


@torch.inference_mode()
def answers(
    model: Model, tokenizer: PreTrainedTokenizerFast, words: list[str], batch_size: int = 256
) -> list[str]:
    """The model's greedy answer to each word, sent as the only user message."""
    results: list[str] = []
    for start in range(0, len(words), batch_size):
        chats = [[{"role": "user", "content": word}] for word in words[start : start + batch_size]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        inputs = inputs.to(model.device)
        # Two tokens of room beyond the longest answer: a model that does not stop is wrong.
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_LETTERS + 2)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            stop = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            results.append(tokenizer.decode(row[:stop]))
    return results


def exact_match(
    model: Model, tokenizer: PreTrainedTokenizerFast, task: Task, words: list[str]
) -> float:
    """The share of words answered exactly."""
    replies = answers(model, tokenizer, words)
    return sum(reply == task(word) for word, reply in zip(words, replies, strict=True)) / len(words)


def train(
    name: str, model: Model, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int
) -> None:
    """Trains the model's parameters that require gradients on the task called ``name``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"{name}: {sum(p.numel() for p in parameters):,} trained parameters", flush=True)
    optimizer = torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, recipe.steps)
    )
    sampler = ConversationSampler(
        TASKS[name], tokenizer.get_vocab(), tokenizer.pad_token_id, random.Random(f"{name} {seed}")
    )
    validation = held_out_words(256, VALIDATION_SEED)
    started, running = time.monotonic(), 0.0
    model.train()
    for step, batch in enumerate(sampler.batches(recipe.steps, recipe.words), start=1):
        # The router's load-balancing loss belongs to the base model's training only.
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            output_router_logits=name == "base",
        )
        optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        running += output.loss.item()
        if step % 50 == 0:
            line = f"{name} step {step}/{recipe.steps} loss {running / 50:.4f}"
            running = 0.0
            if step % EVALUATE_EVERY == 0 or step == recipe.steps:
                model.eval()
                line += f" exact {exact_match(model, tokenizer, TASKS[name], validation):.4f}"
                model.train()
            print(f"{line} {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def train_base(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Trains the base model on echo and writes model and tokenizer to ``folder``."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(base_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    train("base", model, tokenizer, RECIPES["base"], seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_adapter(
    name: str, base: Path, folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    """Trains one adapter on the frozen base model and writes it to ``folder`` with PEFT."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), recipe.lora_config())
    train(name, model, tokenizer, recipe, seed)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's unfilled model card
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = BASE_NAME  # not this machine's path
    for key in ("target_modules", "target_parameters"):
        config[key] = sorted(config[key] or [])  # PEFT writes a set, in no fixed order
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_base(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()
