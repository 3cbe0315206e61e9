"""The server's socket, bound before anything heavy is imported."""

import resource
import socket

MANY_FILES = 2**16


def allow_many_files() -> None:
    """Raise the limit of open files, and so of connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
