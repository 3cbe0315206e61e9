"""Runs an adapter twice, through the engine and merged into a plain model, and compares."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.engine.llm import LLM
from vexpert.engine.outputs import LogprobRow
from vexpert.engine.sampling_params import SamplingParams
from vexpert.lora.build_extras import SUPPORTED
from vexpert.lora.merge import merge_adapter
from vexpert.lora.reader import read_adapter
from vexpert.lora.source import check_path
from vexpert.lora.types import AdapterWeights, TargetMap

NAME = "checked"
PROMPTS = 4
PROMPT_TOKENS = 12
MOST_TOKENS = 256  # log-probs compared at each place: of the likeliest, and of the prompt's own
TOLERANCE = 1e-3  # float32: two orders of summation differ by 1e-5 or so
# In half dtypes rounding flips near ties of the router, and a flip changes a whole row: there the
# median over all places counts. On small random models it is 0.05 for engine and merged alike.
HALF_TOLERANCE = 0.1

Tables = list[list[LogprobRow]]  # by prompt and place: token -> log-prob


@dataclass(frozen=True)
class CheckReport:
    """Largest differences of log-probabilities, over all prompts, places and compared tokens."""

    path: str
    model: str
    dtype: str
    prompts: int
    tokens: int  # of all prompts
    difference: float  # engine with the adapter, and merged weights
    median_difference: float  # the same, median over places of the largest at each
    base_difference: float  # engine and plain model, both without the adapter
    effect: float  # of the adapter: merged and plain weights
    tolerance: float
    warnings: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        counted = self.difference if self.dtype == "float32" else self.median_difference
        return counted <= self.tolerance

    @property
    def verdict(self) -> str:
        if not self.is_right:
            return "DIFFERENT: the engine does not give what the merged weights give"
        if self.effect <= 2 * self.tolerance:
            hint = "" if self.dtype == "float32" else "; try float32"
            return f"right, but the adapter changes too little for this check to tell{hint}"
        return "right"


def check_adapter(
    path: str | Path,
    model: str = "",
    *,
    lora_B_layout: str | None = None,
    prompts: list[str] | None = None,
    **options: Any,
) -> CheckReport:
    """Compare the engine with merged weights on `prompts`, or on random tokens.

    `options`: those of EngineConfig; dtype is float32 unless given. The model is loaded twice, one
    after the other. Raises AdapterError if the adapter is refused, ModelError and ConfigError.
    """
    folder = check_path(path)
    config = EngineConfig.from_options(**{"dtype": "float32", "model": model, **options})
    llm = LLM.from_engine(Engine(config))
    ids = _prompt_ids(llm, prompts)
    # Read first: a refusal then names the folder, not the name that it is served by here.
    targets, weights = _read(llm, folder, lora_B_layout, config.max_lora_rank)
    info = llm.load_adapter(NAME, str(folder), lora_B_layout=lora_B_layout)
    served = _ask(llm, ids)
    facts = llm.engine.model_info
    del llm  # its weights make room for the plain model
    plain = _Plain(config, facts.dtype, facts.device)
    base = plain.log_probs(ids)
    merge_adapter(plain.model, weights, targets)
    merged = plain.log_probs(ids)
    differences = _differences(served[1], merged)
    return CheckReport(
        path=str(path),
        model=facts.name,
        dtype=str(facts.dtype).removeprefix("torch."),
        prompts=len(ids),
        tokens=sum(len(one) for one in ids),
        difference=float(differences.max()),
        median_difference=float(differences.median()),
        base_difference=float(_differences(served[0], base).max()),
        effect=max(float((a - b).abs().max()) for a, b in zip(base, merged, strict=True)),
        tolerance=TOLERANCE if facts.dtype == torch.float32 else HALF_TOLERANCE,
        warnings=info.warnings,
    )


def _prompt_ids(llm: LLM, prompts: list[str] | None) -> list[list[int]]:
    if prompts:
        return [llm.engine.tokenizer.encode(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    shape = (PROMPTS, min(PROMPT_TOKENS, llm.engine.max_model_len - 1))
    vocab_size = llm.engine.model_info.vocab_size
    found: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
    return found


def _ask(llm: LLM, ids: list[list[int]]) -> tuple[Tables, Tables]:
    """Log-probs of the base and of the adapter, asked in one batch."""
    count = min(llm.engine.model_info.vocab_size, MOST_TOKENS)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=count, prompt_logprobs=count)
    batch: list[Any] = [{"prompt_token_ids": one} for one in ids]
    names = [*[None] * len(ids), *[NAME] * len(ids)]
    tables: Tables = []
    for output in llm.generate(batch * 2, params, adapter=names):
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        rows = [row for row in output.prompt_logprobs if row is not None]
        tables.append([*rows, output.outputs[0].logprobs[0]])
    return tables[: len(ids)], tables[len(ids) :]


def _read(
    llm: LLM, path: Path, layout: str | None, max_rank: int
) -> tuple[TargetMap, AdapterWeights]:
    model = llm.engine.model
    weights = read_adapter(
        path,
        model.targets,
        max_rank=max_rank,
        lora_B_layout=layout,
        supported=SUPPORTED,
        base_weight=model.parameter,
    )
    return model.targets, weights


class _Plain:
    """transformers' own model with its own attention and experts."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
        from vexpert.models.checkpoint import build_model, read_config

        self.device = device
        self.model = build_model(config, read_config(config), dtype, device)
        self.model.set_attn_implementation("eager")
        if any(hasattr(module, "is_concatenated") for module in self.model.modules()):
            # The faster ones refuse narrow experts in half dtypes.
            self.model.set_experts_implementation("eager")

    def log_probs(self, ids: list[list[int]]) -> list[torch.Tensor]:
        """[tokens, V] float32 of each prompt, on the host."""
        run = partial(self.model, use_cache=False)
        with torch.inference_mode():
            logits = [run(input_ids=torch.tensor([one], device=self.device)).logits for one in ids]
        return [one[0].float().log_softmax(-1).cpu() for one in logits]


def _differences(tables: Tables, wanted: list[torch.Tensor]) -> torch.Tensor:
    """The largest |difference| at each place, over the tokens that `tables` hold there."""
    found = []
    for table, want in zip(tables, wanted, strict=True):
        for row, truth in zip(table, want, strict=True):
            tokens = torch.tensor(list(row))
            have = torch.tensor([entry.logprob for entry in row.values()])
            found.append((have - truth[tokens]).abs().max())
    return torch.stack(found)
