"""The `vexpert` command."""
