"""uvicorn's protocol, which counts what its client sends, and refuses what is no HTTP as we do."""

import sys

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from vexpert.config import cut, first_line
from vexpert.server.errors import ApiError, error_response

MOST_SHOWN = 200  # characters of what the parser says


class CountingProtocol(H11Protocol):
    """One connection."""

    received = 0  # bytes

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        self.received += len(data)
        super().data_received(data)

    @property
    def has_whole_request(self) -> bool:
        """Whether the body of the request is there, or as much of it as is taken unread."""
        return not self.cycle.more_body or bool(self.flow.read_paused)

    def send_400_response(self, msg: str) -> None:
        """Called where the parser gives up, which raises meanwhile. The connection is closed.

        The request that it is amid gets an answer if it has none yet; one that waits for its body
        ends as where the client leaves.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        amid = self.conn.our_state is h11.SEND_RESPONSE
        if amid or self.conn.our_state is h11.IDLE:
            is_bodiless = amid and self.scope["method"] == "HEAD"
            self._write(_refusal(sys.exception()), is_bodiless)
        self.transport.close()

    def _write(self, response: Response, is_bodiless: bool) -> None:
        code = response.status_code
        head = h11.Response(
            status_code=code, headers=response.raw_headers, reason=STATUS_PHRASES[code]
        )
        body = h11.Data(data=b"" if is_bodiless else bytes(response.body))
        for event in (head, body, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def _refusal(error: BaseException | None) -> Response:
    assert isinstance(error, h11.RemoteProtocolError), "called elsewhere"
    status = 431 if error.error_status_hint == 431 else 400
    reason = cut(first_line(error), MOST_SHOWN)
    response = error_response(ApiError(f"what was sent is no valid HTTP request: {reason}", status))
    response.headers["Connection"] = "close"
    return response
