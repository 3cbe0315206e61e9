"""Logging: one logger tree named `vexpert`, and choices that are logged once."""

import json
import logging
import sys
from datetime import UTC, datetime

_announced: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """Logger of a module, below `vexpert`; handlers and level are the application's choice."""
    return logging.getLogger(name)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the record's own `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`; a traceback is the field `exception`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(tree: str, level: str, form: str) -> None:
    """All lines of a logger tree to stderr, as text or as JSON: of a command, not of a library."""
    handler = logging.StreamHandler()
    line = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else line)
    logger = logging.getLogger(tree)
    logger.setLevel(level)
    logger.addHandler(handler)
    logger.propagate = False


def quiet_libraries() -> None:
    """Keep transformers' own bars, such as that of loading weights, out of log files."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def adopt_libraries() -> None:
    """Send transformers' messages the way of vexpert's, if a command has set that up."""
    handlers = get_logger("vexpert").handlers
    if handlers:
        from transformers.utils.logging import disable_default_handler

        disable_default_handler()
        for handler in handlers:
            get_logger("transformers").addHandler(handler)


def log_once(logger: logging.Logger, message: str) -> None:
    """Log `message` at INFO the first time this process meets it: for choices of a backend."""
    if message not in _announced:
        _announced.add(message)
        logger.info(message)
