"""Base64 in pieces is the same as base64 at once, and refuses the same texts."""

from __future__ import annotations

import base64
from random import Random

import pytest

from skyrl.base.wire import decoding
from skyrl.base.wire.decoding import decode_base64


@pytest.mark.parametrize("piece", [4, 8, 2**20])
def test_pieces_are_the_same_as_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIECE", piece)
    for length in range(60):
        data = Random(length).randbytes(length)
        assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("piece", [4, 2**20])
def test_what_python_refuses_is_refused_in_pieces_too(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "PIECE", piece)
    whole, rng, refused = base64.b64encode(bytes(range(40))).decode(), Random(1), 0
    for _ in range(3000):
        at = rng.randrange(len(whole))
        text = whole[:at] + rng.choice(("", "=", "==", "\n", "-", "é", "A")) + whole[at + rng.choice((0, 1)) :]
        try:
            expected: bytes | None = base64.b64decode(text, validate=True)
        except ValueError:
            expected, refused = None, refused + 1
        if expected is None:
            with pytest.raises(ValueError, match="."):
                decode_base64(text)
        else:
            assert decode_base64(text) == expected
    assert 500 < refused < 2900
