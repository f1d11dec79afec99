"""The events of a stream, as they arrive from the inference server. Knows their frames; does not know their content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from skyrl.server.sampling.answer_stream import AnswerStream
from skyrl.server.sampling.transport import Interrupted

DONE = b"[DONE]"
"""The last event of a complete stream."""
_PREFIX, _END = b"data:", b"\n\n"


def event(data: bytes) -> bytes:
    """The frame of an event for the caller."""
    return b"data: " + data + b"\n\n"


class Events:
    """Reads the events of an answer, at most `max_bytes` of them. `first` is the data of the first event."""

    first: bytes

    def __init__(self, stream: AnswerStream, max_bytes: int) -> None:
        self._stream = stream
        self._unread: deque[bytes] = deque()
        self._left = max_bytes
        self._buffer = bytearray()
        self._searched = 0

    async def next(self) -> bytes:
        """The data of the next event, DONE at the end. Raises Interrupted if the answer breaks off before its end."""
        if self._unread:
            return self._unread.popleft()
        while True:
            end = self._buffer.find(_END, self._searched)
            if end >= 0:
                frame = bytes(self._buffer[:end])
                del self._buffer[: end + len(_END)]
                self._searched = 0
                if frame.startswith(_PREFIX):  # else it is a comment
                    return frame[len(_PREFIX) :].strip()
                continue
            self._searched = max(0, len(self._buffer) - 1)
            piece = await self._stream.read()
            if not piece:
                raise Interrupted("the stream ended before its last event")
            self._left -= len(piece)
            if self._left < 0:
                raise Interrupted("the stream is larger than any right answer to this request")
            self._buffer += piece

    def unread(self, events: Iterable[bytes]) -> None:
        """`next` returns these events again, before all others."""
        self._unread.extend(events)

    def close(self) -> None:
        """End the connection; the inference server stops computing."""
        self._stream.close()
