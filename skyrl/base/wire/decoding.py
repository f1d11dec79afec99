"""Decodes JSON request bodies. Every fault becomes a RequestError that names the field."""

from __future__ import annotations

import re
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
