"""Chat completions spoken as they are: what clients of OpenAI's chat completions read."""

from __future__ import annotations

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.server.openai.errors import OpenAIError, error_body
from skyrl.server.openai.events import DONE, event


class ChatSpeaker:
    """Every answer and chunk goes on unchanged."""

    def whole(self, answer: bytes) -> bytes:
        return answer

    def events(self, chunk: bytes) -> bytes:
        return event(chunk)

    def end(self) -> bytes:
        return event(DONE)

    def failed(self, error: RequestError) -> bytes:
        code = error.code if isinstance(error, OpenAIError) else None
        return event(msgspec.json.encode(error_body(error.status, error.message, error.field, code)))
