"""Logging: one logger tree named `vexpert`, and choices that are logged once."""

import json
import logging
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


def log_once(logger: logging.Logger, message: str) -> None:
    """Log `message` at INFO the first time this process meets it: for choices of a backend."""
    if message not in _announced:
        _announced.add(message)
        logger.info(message)
