"""Parts of the demo model's training."""
