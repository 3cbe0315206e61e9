"""Backend-neutral LoRA and MoE operations; `torch` on the CPU, `triton` on a GPU."""
