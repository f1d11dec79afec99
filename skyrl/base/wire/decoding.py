"""Decodes JSON request bodies, and long ones without keeping the event loop and other threads waiting.

Every fault of a JSON body becomes a RequestError that names the field. `decode_base64` takes base64 of any length;
`with_short_switches` is for other work on a thread beside the event loop.
"""

from __future__ import annotations

import binascii
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from skyrl.base.wire.errors import RequestError

S = TypeVar("S", bound=msgspec.Struct)

_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode_json(kind: type[S], body: bytes) -> S:
    """The body as a `kind`; fields that `kind` lacks are skipped. Raises RequestError naming the field (a JSON path
    without the leading `$.`)."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def decode_part(kind: Any, part: msgspec.Raw, field: str) -> Any:
    """The undecoded value of `field` as a `kind`. Raises RequestError naming what is wrong in it."""
    if not bytes(part):
        raise RequestError("is missing", field=field)
    try:
        return msgspec.json.decode(part, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"is not JSON: {error}", field=field) from error
    except RecursionError as error:
        raise RequestError("is nested too deeply", field=field) from error


def _refusal(sentence: str, within: str = "") -> RequestError:
    """The RequestError for msgspec's sentence, which reads "<problem> - at `$.<field>`"; `$` is the field `within`."""
    problem, _, path = sentence.rpartition(" - at `$")
    field = (within + (path.rstrip("`") if problem else "")).lstrip(".")
    if (missing := _MISSING.fullmatch(problem or sentence)) is not None:
        return RequestError("is missing", field=f"{field}.{missing[1]}" if field else missing[1])
    return RequestError(problem or sentence, field=field or None)


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, undecoded. Raises RequestError.

    `decode_json` checks less, because it skips fields: a body that it has accepted may be refused here.
    """
    return _decode_any(body, dict[str, msgspec.Raw], "the body ", None)


def raw_value(text: msgspec.Raw, field: str) -> Any:
    """The decoded value of a field of `raw_fields`. Raises RequestError naming `field`."""
    return _decode_any(text, Any, "", field)


def _decode_any(text: bytes | msgspec.Raw, kind: Any, subject: str, field: str | None) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"{subject}is not JSON: {error}", field=field) from error
    except RecursionError as error:
        raise RequestError(f"{subject}is nested too deeply", field=field) from error


PIECE = 2**20
"""Characters that are decoded at once."""


def decode_base64(text: str) -> bytes:
    """Raises ValueError for anything but RFC 4648's base64 with its padding."""
    if len(text) % 4 or text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("incorrect padding")
    pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)


SHORT_SWITCH_S, NORMAL_SWITCH_S = 0.0002, sys.getswitchinterval()
"""Python's switch interval during such work, and otherwise. After this time a thread gives the interpreter lock to
another thread that waits."""

T = TypeVar("T")


def with_short_switches(work: Callable[[], T]) -> T:
    """Run `work` with SHORT_SWITCH_S. The event loop gives up the lock at each system call; with NORMAL_SWITCH_S it
    would wait 5 ms each time to get the lock back. If two calls overlap, the first that ends sets NORMAL_SWITCH_S for
    both, so SHORT_SWITCH_S never stays."""
    sys.setswitchinterval(SHORT_SWITCH_S)
    try:
        return work()
    finally:
        sys.setswitchinterval(NORMAL_SWITCH_S)
