"""The message by which the engine gives a new adapter to the host of a replica, before the checkpoint store has it.

It is a request to load an adapter by its reference, with the files behind it: one line of JSON,
`{"lora_name", "lora_path", "files": {name: bytes}}`, then the files' bytes in that order. Before it the engine asks
with the directory alone, `{"lora_name", "lora_path", "held"}`: a host on the same machine takes the files from there,
and any other one answers SEND_FILES. Knows neither vLLM nor the node's cache. A host that has missed the message
fetches the adapter from the store.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from skyrl.base.adapter_files import MAX_CONFIG_BYTES, PEFT_JSON
from skyrl.storage.checkpoint_store.held import MOST_BYTES
from skyrl.storage.checkpoint_store.versions import is_adapter

CONTENT_TYPE = "application/x-skyrl-adapter"
SEND_FILES = 409
MAX_HEAD = 2**14
PIECE_BYTES = 2**20


class BadMessage(ValueError):
    """The text is for whoever sent the message. `status` is that of the answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class AdapterMessage:
    """The message for the files in `directory`, which are opened at once: they may be deleted after that. A context
    manager. Raises OSError."""

    def __init__(self, request: Mapping[str, str], directory: Path) -> None:
        with ExitStack() as opened:
            self._files = [opened.enter_context(file.open("rb")) for file in sorted(directory.iterdir())]
            sizes = {Path(file.name).name: file.seek(0, 2) for file in self._files}
            self._opened = opened.pop_all()
        self._head = json.dumps({**request, "files": sizes}).encode() + b"\n"
        size = len(self._head) + sum(sizes.values())
        self.headers = {"content-type": CONTENT_TYPE, "content-length": str(size)}

    def __enter__(self) -> AdapterMessage:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self._head
        for file in self._files:
            file.seek(0)
            while piece := file.read(PIECE_BYTES):
                yield piece


@dataclass(frozen=True)
class Head:
    """`fields` is the request to load; `sizes` are the bytes of each file, in the order in which they come."""

    fields: dict[str, Any]
    sizes: dict[str, int]


async def read_head(pieces: AsyncIterator[bytes]) -> tuple[Head, bytes]:
    """The message's beginning, and what has come behind it. Raises BadMessage."""
    begun = b""
    async for piece in pieces:
        begun += piece
        if b"\n" in begun or len(begun) > MAX_HEAD:
            break
    line, end, rest = begun.partition(b"\n")
    if not end or len(line) > MAX_HEAD:
        raise BadMessage(f"the message does not begin with a line of at most {MAX_HEAD} bytes")
    try:
        fields = json.loads(line)
        sizes = fields.pop("files")
        named = {str(name): int(size) for name, size in sizes.items() if type(size) is int and size >= 0}
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise BadMessage("the message's first line is no JSON with `files`") from error
    if not is_adapter(named) or len(named) < len(sizes) or named[PEFT_JSON] > MAX_CONFIG_BYTES:
        raise BadMessage("files: names other files than an adapter's, or sizes that those cannot have")
    if sum(named.values()) > MOST_BYTES:
        raise BadMessage(f"files: an adapter in a message has at most {MOST_BYTES} bytes", 413)
    return Head(fields, named), rest


async def in_pieces(begun: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`begun` and the rest of a body in pieces of about PIECE_BYTES: each is written by a thread."""
    parts, size = [begun], len(begun)
    async for part in pieces:
        parts.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


class FilesWriter:
    """Writes the bytes behind a head into a directory, as they come. Close it. Methods block, and raise OSError."""

    def __init__(self, directory: Path, sizes: Mapping[str, int]) -> None:
        self._directory = directory
        self._left = list(sizes.items())
        self._file: BinaryIO | None = None
        self._missing = 0

    def write(self, content: bytes) -> None:
        """Raises BadMessage when more comes than was said."""
        while content:
            while not self._missing:
                self._next()
            assert self._file is not None
            piece, content = content[: self._missing], content[self._missing :]
            self._file.write(piece)
            self._missing -= len(piece)

    def end(self) -> None:
        """All has come. Raises BadMessage when it is less than was said."""
        while self._left and not self._missing:  # files without a byte
            self._next()
        if self._missing:
            raise BadMessage("the message ends before its files do")
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _next(self) -> None:
        if not self._left:
            raise BadMessage("more comes than the message's files have")
        self.close()
        name, self._missing = self._left.pop(0)
        self._file = (self._directory / name).open("wb")
