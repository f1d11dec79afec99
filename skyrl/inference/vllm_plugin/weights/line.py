"""A socket by which the sidecar asks a vLLM worker about its weights without the engine.

A call through vLLM's `/collective_rpc` waits for the end of the engine's present step, and the next step waits for the
call. That is right for a call that changes the model, and needless for all others: a busy CPU takes a second or more
for a step, and an update has a dozen calls.

The socket is in Linux's abstract namespace: it has no file, and ends with the process. Only processes of the worker's
user are answered. A request and its answer are one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

MAX_LINE = 64 * 2**20
"""Bytes of a request: one of 20,000 tensors with checksums has 4 MiB."""
ENGINE_CALLS = frozenset({"apply", "reset_tensors", "weight"})
"""What the engine must not run beside: a line refuses it."""
_CREDENTIALS = struct.Struct("iII")

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


class Line:
    """`answer(call, arguments)` gives the JSON object for each request, in a thread of the request's own. Raises
    OSError."""

    def __init__(self, answer: Answer) -> None:
        self.address = f"skyrl-weights-{secrets.token_hex(16)}"
        """Without the zero byte with which an abstract name begins."""
        self._answer = answer
        self._server = _Server(f"\0{self.address}", self._serve)
        threading.Thread(target=self._server.serve_forever, name="skyrl line", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(raw)[1] != os.geteuid():
            return
        with connection.makefile("rb") as lines:
            request = lines.readline(MAX_LINE)
        try:
            asked = json.loads(request)
            call, arguments = asked["call"], asked["arguments"]
        except (ValueError, KeyError, TypeError):
            return  # the peer ended in the middle of its line
        if call in ENGINE_CALLS:
            return
        answer = json.dumps(self._answer(call, arguments)).encode() + b"\n"
        with contextlib.suppress(ConnectionError):  # the peer has not waited for it
            connection.sendall(answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with request:
            self._serve(request)
