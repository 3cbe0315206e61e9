"""Clients that do what libraries do not: read nothing, send half a request."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit


def request_bytes(body: Any, path: str = "/v1/completions") -> bytes:
    """A POST request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def connect(url: str) -> socket.socket:
    """A connection that takes little before it is full."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    parts = urlsplit(url)
    sock.connect((parts.hostname, parts.port))
    sock.settimeout(60)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """What comes up to the end."""
    found = b""
    while piece := sock.recv(1 << 16):
        found += piece
    return found


def is_cut(sock: socket.socket) -> bool:
    """Read to the end; whether the server broke the connection."""
    try:
        while sock.recv(2**20):
            pass
    except ConnectionResetError:
        return True
    return False
