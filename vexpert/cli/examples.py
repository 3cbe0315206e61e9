"""Examples below the help of each command: (arguments, what they do)."""

from collections.abc import Sequence

Example = tuple[str, str]

EXAMPLES: dict[str, Sequence[Example]] = {
    "vexpert": (
        ("serve", "the bundled demo, on port 8000"),
        ("chat --compare hello", "one word to every name it serves"),
    ),
    "serve": (
        ("", "the bundled demo and its four adapters"),
        ("path/to/model --lora-modules legal=path/to/adapter", "a model and an adapter"),
        ("path/to/model --max-loras 32 --gpu-memory-utilization 0.8", "fewer slots, less memory"),
        ("--config serve.yaml --port 8001", "options from a file: `max-loras: 32`, one a line"),
    ),
    "chat": (
        ("", "talk; /help shows what else can be typed"),
        ("--model upper --once hello", "one answer"),
        ("--url http://gpu-1:8000 --compare hello", "one word to every name"),
    ),
    "adapter": (
        ("inspect path/to/adapter", "ranks, targets and sizes of its files"),
        ("check path/to/adapter --model path/to/model", "does it change the answers as it should"),
    ),
    "bench": (
        ("serve --request-rate 20", "latencies of a running server"),
        ("throughput", "tokens/s of the demo in this process, base beside its adapters"),
        ("kernel", "one MoE layer, without and with LoRA"),
    ),
    "bench kernel": (
        ("", "the whole grid on a GPU, a small one on a CPU"),
        ("--ranks 16 --adapters 32 --tokens 128", "one row"),
    ),
    "bench tune": (
        ("--shape mixtral-8x7b --minutes 5", "kernel_plans.json, for --kernel-plans"),
        ("--shape 2048x1408x64x6 --tokens 1 32 --adapters 8", "a shape without a name"),
    ),
    "bench throughput": (
        ("", "the bundled demo"),
        ("path/to/model --lora-modules a=path/to/a b=path/to/b", "two adapters against base"),
        ("--shape qwen3-30b-a3b-8l --adapters 0 1 8 32 --prefill 16x512", "random weights, a GPU"),
    ),
    "bench serve": (
        ("--num-prompts 200", "all at once, names drawn uniformly"),
        ("--request-rate 20 --popularity zipf --plot run.png", "Poisson arrivals, and a picture"),
    ),
    "completion": (("bash", "for ~/.bashrc"), ("zsh", "for ~/.zshrc")),
}


def examples(command: str, rows: Sequence[Example]) -> str | None:
    """The text below the help; None: nothing."""
    if not rows:
        return None
    lines = [f"{command} {arguments}".rstrip() for arguments, _ in rows]
    width = min(max(map(len, lines)), 64)
    shown = [f"  {line:<{width}}  # {row[1]}" for line, row in zip(lines, rows, strict=True)]
    return "\n".join(["examples:", *shown])
