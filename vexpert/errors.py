"""Errors a user can cause. Each message says the cause, the value and the remedy."""


class VexpertError(ValueError):
    """Base of every error that the caller can mend; a server answers it with a 4xx status."""


class ConfigError(VexpertError):
    """An option is unknown, has a bad value, or contradicts another."""


class ModelError(VexpertError):
    """The base model cannot be served, with the reason."""


class AdapterError(VexpertError):
    """An adapter is refused, unknown, or cannot be loaded or unloaded now."""


class AdapterNotFoundError(AdapterError):
    """No adapter has this name."""


class RequestError(VexpertError):
    """A request is refused before it runs.

    `param` is the request field at fault, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedError(VexpertError):
    """No backend can run this operation with this shape, dtype and device."""
