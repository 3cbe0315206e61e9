"""The engine benchmark: decode and prefill of a whole model, beside the floor of its bytes."""
