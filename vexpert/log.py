"""Logging: one logger tree named `vexpert`, and choices that are logged once."""

import logging

_announced: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """Logger of a module, below `vexpert`; handlers and level are the application's choice."""
    return logging.getLogger(name)


def log_once(logger: logging.Logger, message: str) -> None:
    """Log `message` at INFO the first time this process meets it: for choices of a backend."""
    if message not in _announced:
        _announced.add(message)
        logger.info(message)
