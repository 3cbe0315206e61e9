"""Tool calling: what the model is told, what it may write, and what its text means."""
