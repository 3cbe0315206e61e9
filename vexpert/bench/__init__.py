"""Kernel benchmark as a library: what is timed, how, and beside which floor. Used by the CLI."""
