"""JSON objects whose fields are looked at by name, without a struct.

Decoding into a struct skips what the struct does not have: a body that passed there may still fail here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from skyrl.wire.errors import RequestError


def raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, undecoded. Raises RequestError."""
    return _decoded(body, dict[str, msgspec.Raw], "the body ", None)


def raw_value(text: msgspec.Raw, field: str) -> Any:
    """What a field of `raw_fields` holds. Raises RequestError naming `field`."""
    return _decoded(text, Any, "", field)


def _decoded(text: bytes | msgspec.Raw, kind: Any, what: str, field: str | None) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"{what}is not JSON: {error}", field=field) from error
    except RecursionError as error:
        raise RequestError(f"{what}is nested too deeply", field=field) from error
