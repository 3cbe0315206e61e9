"""bfloat16 beside float32 on the device that serves, and float32 batches beside single requests.

The reference is this engine in float32 on PyTorch operations alone (random weights on a GPU: on
the float32 kernels), which other tests hold to transformers' own models with merged weights; its
weights are the bfloat16 ones, so that only the arithmetic differs. Tests marked `gpu` run the
kernels. Beside them stand PyTorch's own operations in bfloat16: on a CPU this engine's, on a GPU
transformers' model, for adapters with weights that are merged and rounded.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers_demo import NAMES, expected, random_words
from safetensors.torch import load_file, save_file

from vexpert import LLM, SamplingParams
from vexpert.bench.engine.files import find_model_shape, write_adapter, write_model
from vexpert.config import EngineConfig
from vexpert.demo import adapter_paths, model_path
from vexpert.engine.check import _Plain, _read
from vexpert.lora.merge import merge_adapter
from vexpert.models.served import TransformersModel

# Of a generated token's log-probability, at the 99th percentile; or what WORSE allows where
# bfloat16 is coarser: 8 random layers cost PyTorch 5e-2.
LIMIT = 2e-2
WORSE = 1.5  # times PyTorch's own error in bfloat16
DEVICES = [("cpu", 15), pytest.param("cuda", 100, marks=pytest.mark.gpu)]
RANDOM = [("cpu", "tiny"), pytest.param("cuda", "qwen3-30b-a3b-8l", marks=pytest.mark.gpu)]
Work = list[tuple[list[int], str | None]]  # token ids, adapter
Told = Callable[[Work, list[list[int]]], torch.Tensor]  # see `told`


def rounded_copy(source: Path, target: Path) -> Path:
    """The folder with its weights in bfloat16."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    tensors = {name: x.to(torch.bfloat16) for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def serve(model: Path, adapters: dict[str, Path], device: str, dtype: str, backend: str) -> LLM:
    llm = LLM(
        model=str(model),
        device=device,
        dtype=dtype,
        lora_backend=backend,
        load_format="auto" if (model / "model.safetensors").exists() else "dummy",
        max_model_len=512,
        kv_cache_memory=1 << 28,
        lora_memory=2 << 30 if device == "cuda" else 1 << 28,
        lora_host_memory=2 << 30 if device == "cuda" else 1 << 28,
        warm_up="none",
    )
    for name, path in adapters.items():
        llm.load_adapter(name, str(path))
    return llm


def copy_weights(source: LLM, target: torch.nn.Module) -> None:
    """Of a model whose weights are random."""
    for name, parameter in target.named_parameters():
        given = source.engine.model.parameter(name)
        assert given is not None, name
        parameter.data.copy_(given)


def modules_of(llm: LLM) -> torch.nn.Module:
    served = llm.engine.model
    assert isinstance(served, TransformersModel)
    module: torch.nn.Module = served.model
    return module


def chosen(llm: LLM, work: Work, steps: int) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each request, all in one batch, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=steps, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    outputs = llm.generate(prompts, params, adapter=[name for _, name in work])
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    rows = [output.outputs[0].logprobs or [] for output in outputs]
    values = [
        row[token].logprob
        for ids, each in zip(tokens, rows, strict=True)
        for token, row in zip(ids, each, strict=True)
    ]
    return tokens, torch.tensor(values)


def told(llm: LLM, work: Work, tokens: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of `tokens` where they are given to the model instead of chosen."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": ids + new} for (ids, _), new in zip(work, tokens, strict=True)]
    values = []
    outputs = llm.generate(prompts, params, adapter=[name for _, name in work])
    for output, (ids, _), new in zip(outputs, work, tokens, strict=True):
        assert output.prompt_logprobs is not None
        for token, row in zip(new, output.prompt_logprobs[len(ids) :], strict=True):
            assert row is not None
            values.append(row[token].logprob)
    return torch.tensor(values)


class Transformers:
    """transformers' own model in bfloat16, with the random weights of `served`."""

    def __init__(self, served: LLM, folder: Path, adapters: dict[str, Path]) -> None:
        self.served, self.adapters = served, adapters
        config = EngineConfig(model=str(folder), load_format="dummy", dtype="bfloat16")
        self.plain = _Plain(config, torch.bfloat16, served.engine.model_info.device)

    def told(self, work: Work, tokens: list[list[int]]) -> torch.Tensor:
        """What `told` gives, adapter by adapter."""
        found: dict[int, torch.Tensor] = {}
        for name in (None, *self.adapters):
            copy_weights(self.served, self.plain.model)
            if name is not None:
                targets, weights = _read(self.served, self.adapters[name], None, 16)
                merge_adapter(self.plain.model, weights, targets)
            for index, ((ids, used), new) in enumerate(zip(work, tokens, strict=True)):
                if used == name:
                    (table,) = self.plain.log_probs([ids + new])
                    rows = table[len(ids) - 1 : -1]
                    found[index] = rows.gather(1, torch.tensor(new)[:, None])[:, 0]
        return torch.cat([found[index] for index in range(len(work))])


def check(served: LLM, plain: Told, reference: LLM, work: Work, steps: int) -> None:
    """`served` and `plain` in bfloat16, the second on PyTorch operations, against float32."""
    tokens, decoded = chosen(served, work, steps)
    want = told(reference, work, tokens)
    errors = {
        "decoded": decoded - want,
        "as prompts": told(served, work, tokens) - want,
        "PyTorch": plain(work, tokens) - want,
    }
    found: dict[tuple[bool, str], torch.Tensor] = {}
    for adapted in (False, True):
        mine = torch.tensor(
            [
                (name is not None) == adapted
                for (_, name), new in zip(work, tokens, strict=True)
                for _ in new
            ]
        )
        for what, error in errors.items():
            found[adapted, what] = row = error[mine].abs()
            figures = f"mean {row.mean():.2e}, p99 {row.quantile(0.99):.2e}, max {row.max():.2e}"
            print("LoRA" if adapted else "base", what, figures, f"of {len(row)}")
    for (adapted, what), row in found.items():
        if what != "PyTorch":
            plain_row = found[adapted, "PyTorch"]
            most = max(LIMIT, WORSE * float(plain_row.quantile(0.99)))
            assert row.quantile(0.99) <= most, (adapted, what)
            assert row.mean() <= WORSE * plain_row.mean() + 1e-3, (adapted, what)


def demo_work(llm: LLM, count: int) -> Work:
    """Words for base and the four adapters, in turn."""
    tokenizer, work = llm.get_tokenizer(), []
    for index, word in enumerate(random_words(count, seed=11)):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": word}], add_generation_prompt=True, tokenize=False
        )
        name = NAMES[index % len(NAMES)]
        work.append((tokenizer.encode(text, add_special_tokens=False), name))
    return work


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """The demo and its adapters, all rounded to bfloat16."""
    adapters = {n: rounded_copy(path, tmp_path / n) for n, path in adapter_paths().items()}
    return rounded_copy(model_path(), tmp_path / "model"), adapters


@pytest.mark.parametrize(("device", "count"), DEVICES)
def test_the_demo_in_bfloat16(device: str, count: int, demo: tuple[Path, dict[str, Path]]) -> None:
    served = serve(*demo, device, "bfloat16", "auto")
    plain = serve(*demo, "cpu", "bfloat16", "torch")
    reference = serve(*demo, "cpu", "float32", "torch")
    check(served, partial(told, plain), reference, demo_work(served, count), steps=16)


@pytest.mark.parametrize(("device", "shape"), RANDOM)
def test_random_weights_in_bfloat16(device: str, shape: str, tmp_path: Path) -> None:
    sizes = find_model_shape(shape)
    write_model(tmp_path / "model", sizes)
    adapters = {f"a{i}": tmp_path / f"a{i}" for i in range(2)}
    for seed, path in enumerate(adapters.values()):
        write_adapter(path, sizes, 16, seed)
    given = tmp_path / "model", adapters, device
    served = serve(*given, "bfloat16", "auto")
    on_cpu = device == "cpu"
    reference = serve(*given, "float32", "torch" if on_cpu else "auto")
    copy_weights(served, modules_of(reference))
    if on_cpu:
        ours = serve(*given, "bfloat16", "torch")
        copy_weights(served, modules_of(ours))
        plain: Told = partial(told, ours)
    else:
        plain = Transformers(served, tmp_path / "model", adapters).told
    draw = torch.Generator().manual_seed(4)
    names = [None, *adapters]
    prompts = [
        torch.randint(2, sizes.vocab, (5 + 7 * i,), generator=draw).tolist() for i in range(12)
    ]
    check(served, plain, reference, [(ids, names[i % 3]) for i, ids in enumerate(prompts)], 16)


@pytest.mark.parametrize(("device", "count"), DEVICES)
def test_a_mixed_batch_of_the_demo_equals_one_by_one(device: str, count: int) -> None:
    llm = serve(model_path(), adapter_paths(), device, "float32", "auto")
    work = demo_work(llm, count)
    together, _ = chosen(llm, work, steps=16)
    alone = [chosen(llm, [each], steps=16)[0][0] for each in work]
    assert together == alone
    words = random_words(count, seed=11)
    answers = [llm.get_tokenizer().decode(t, skip_special_tokens=True) for t in together]
    right = [
        answer == expected(name, word)
        for answer, (_, name), word in zip(answers, work, words, strict=True)
    ]
    assert sum(right) >= 0.95 * count - 1
