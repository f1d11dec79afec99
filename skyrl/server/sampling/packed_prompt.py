"""The token ids of a prompt as the JSON that goes to the inference server.

A list of 512 numbers takes some 18 kB in hundreds of objects, which the garbage collector looks at in each of its
passes while the sample is in flight. As JSON they are one object of some 2.5 kB, and vLLM needs them as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[int]).decode


class PackedPrompt(Sequence[int]):
    """Reads like a list, but an item costs as much as all of them: take `[:]` before many."""

    __slots__ = ("_length", "json")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.json = msgspec.Raw(_encode(tokens))
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return _decode(self.json)[index]

    def __eq__(self, other: object) -> bool:
        return self[:] == (other[:] if isinstance(other, PackedPrompt) else other)

    __hash__ = None  # type: ignore[assignment]


def as_json(prompt: Sequence[int]) -> msgspec.Raw | Sequence[int]:
    """What msgspec encodes for this prompt."""
    return prompt.json if isinstance(prompt, PackedPrompt) else prompt
