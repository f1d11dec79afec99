"""The fields that say what an answer must look like: `response_format`, `structured_outputs`, and tools that must be
called. They are checked and bounded here, because vLLM would ignore a part of them, and pays for large ones with time.
`grammars` is whether regular expressions and grammars are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.server.openai.json_schema import MAX_DEPTH, NEEDS_GRAMMARS, check_schema

MAX_SCHEMA_BYTES = 64 * 2**10
"""Of all JSON schemas of a request together. A schema of 2,000 properties is as large, and takes vLLM 0.7 s beside its
other work."""
MAX_GRAMMAR_BYTES = 16 * 2**10
"""Of a regular expression, a grammar and a structural tag, where they are accepted."""
MAX_CHOICE_BYTES = 64 * 2**10
"""Of all texts of `choice` together."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's own way to say it. Its fields for white space and additional properties are missing: they work for the
    whole server only."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


def check_response_format(given: ResponseFormat, *, grammars: bool) -> None:
    """Raises RequestError naming the part."""
    schema = None if given.json_schema is None else given.json_schema.schema
    if given.type == "json_schema" and schema is None:
        raise RequestError("is missing", field="response_format.json_schema.schema")
    if schema is not None:
        _check_bounded(schema, "response_format.json_schema.schema", grammars)


def check_structured_outputs(given: StructuredOutputs, *, grammars: bool) -> None:
    """Raises RequestError naming the part."""
    for name in ("regex", "grammar", "structural_tag"):
        if (value := getattr(given, name)) is not None:
            if not grammars:
                raise RequestError(NEEDS_GRAMMARS, field=f"structured_outputs.{name}")
            _check_bytes(value, MAX_GRAMMAR_BYTES, f"structured_outputs.{name}")
    _check_bytes("".join(given.choice or ()), MAX_CHOICE_BYTES, "structured_outputs.choice")
    if given.json is not None:
        field = "structured_outputs.json"
        _check_bounded(_decoded(given.json, field) if isinstance(given.json, str) else given.json, field, grammars)
    if given.structural_tag is not None:
        field = "structured_outputs.structural_tag"
        _check_tag(_decoded(given.structural_tag, field), field)


def check_tools(tools: Sequence[Tool], *, must_call: bool, grammars: bool) -> None:
    """vLLM makes a grammar from the parameters of tools of which one must be called, and of strict tools. Other tools
    are text of the prompt, and are not bounded here: agents have hundreds. Raises RequestError."""
    enforced = {number: tool for number, tool in enumerate(tools) if must_call or tool.function.strict}
    for number, tool in enforced.items():
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"tools[{number}].function.parameters", patterns=grammars)
    _check_bytes(msgspec.json.encode(list(enforced.values())), MAX_SCHEMA_BYTES, "tools")


def _check_bounded(schema: Any, field: str, grammars: bool) -> None:
    check_schema(schema, field, patterns=grammars)
    _check_bytes(msgspec.json.encode(schema), MAX_SCHEMA_BYTES, field)


def _check_tag(part: Any, field: str, depth: int = 1) -> None:
    """A structural tag has JSON schemas at any depth."""
    if depth > MAX_DEPTH:
        raise RequestError(f"is nested more than {MAX_DEPTH} deep", field=field)
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        if key in ("json_schema", "schema"):
            check_schema(value, f"{field}.{key}", patterns=True)
        else:
            _check_tag(value, field, depth + 1)


def _decoded(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise RequestError(f"is not JSON: {error}", field=field) from error
    except RecursionError as error:
        raise RequestError("is nested too deeply", field=field) from error


def _check_bytes(text: str | bytes, most: int, field: str) -> None:
    size = len(text.encode() if isinstance(text, str) else text)
    if size > most:
        raise RequestError(f"has {size} bytes; at most {most} are accepted", field=field)
