"""The MoE runner: route, gate_up, hook, activation, down, hook, combine. Knows nothing of LoRA."""
