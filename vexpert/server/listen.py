"""The server's socket, bound before anything heavy is imported."""

import resource
import socket

from vexpert.errors import ConfigError

MANY_FILES = 2**16
# Not for connections: the engine's socket, pipes, libraries, files that are read, those connections
# that are accepted to say no, and those that are closed but not gone.
RESERVED_FILES = 128


def allow_many_files() -> None:
    """Raise the limit of open files, and so of connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections(wanted: int | None) -> int:
    """Connections at once: `wanted`, or what the limit of open files leaves. Raises ConfigError."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MANY_FILES if limit == resource.RLIM_INFINITY else limit
    possible = limit - RESERVED_FILES
    if possible < 1:
        needed = RESERVED_FILES + 1
        message = f"the limit of open files is {limit}, and a server needs {needed} at least"
        raise ConfigError(f"{message}; raise it with `ulimit -n`")
    if wanted is not None and not 1 <= wanted <= possible:
        message = f"max_connections={wanted}: use 1 to {possible}"
        raise ConfigError(f"{message}, or raise the limit of open files, {limit} (`ulimit -n`)")
    return possible if wanted is None else wanted


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0: a free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, host: str) -> str:
    """The URL under which `host`, as the user wrote it, answers on this socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"
