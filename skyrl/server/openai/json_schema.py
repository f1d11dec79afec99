"""Checks a JSON schema that an answer must follow: xgrammar, which makes vLLM's grammars, ignores what it does not
enforce, and an ignored keyword would change the meaning of a request in silence.

tests/component/server/test_enforced_schemas.py tries every keyword of this file with xgrammar itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.base.wire.errors import RequestError

MAX_DEPTH = 64
MAX_COUNT = 1_000_000
"""Of the keywords that count, such as minItems. xgrammar reads some numbers from 2^31 on as others."""

ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator"}
    | {"example", "examples", "readOnly", "title", "writeOnly"}
)
"""Keywords that restrict no value. So do all that begin with x-."""
ALONE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""xgrammar enforces one of these, and ignores all other keywords beside it."""
OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}),
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"}),
    "object": frozenset(
        {"additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "propertyNames"}
        | {"required", "unevaluatedProperties"}
    ),
}
"""Keywords that are enforced where `type` names the type. (For objects and arrays also without `type`.)"""
_COUNTS = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_SCHEMAS = frozenset({"additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_KNOWN = ANNOTATIONS.union(ALONE, {"type"}, *OF_TYPE.values())
_PATTERNS = frozenset({"pattern", "patternProperties"})
NEEDS_GRAMMARS = "is accepted only if the server is started with openai_grammars: it could stop vLLM for other tenants"
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def check_schema(schema: Any, field: str, *, patterns: bool) -> None:
    """`patterns`: whether regular expressions are accepted. Raises RequestError naming the keyword, as a path after
    `field`."""
    if not isinstance(schema, dict):
        raise RequestError("must be a JSON schema, which is an object", field=field)
    _check(schema, field, patterns, 1)


def _check(schema: Any, field: str, patterns: bool, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError("must be a JSON schema: an object, or true", field=field)
    if depth > MAX_DEPTH:
        raise RequestError(f"is nested more than {MAX_DEPTH} deep", field=field)
    for keyword in schema:
        if keyword not in _KNOWN and not keyword.startswith("x-"):
            raise RequestError("is not enforced by this server", field=f"{field}.{keyword}")
        if keyword in _PATTERNS and not patterns:
            raise RequestError(NEEDS_GRAMMARS, field=f"{field}.{keyword}")
    _check_alone(schema, field)
    _check_types(schema, field)
    _check_values(schema, field)
    for keyword, value in schema.items():
        path = f"{field}.{keyword}"
        if keyword in _SCHEMAS:
            _check(value, path, patterns, depth + 1)
        elif keyword in _LISTS:
            if not isinstance(value, list):
                raise RequestError("must be a list of JSON schemas", field=path)
            for number, each in enumerate(value):
                _check(each, f"{path}[{number}]", patterns, depth + 1)
        elif keyword in _MAPS:
            if not isinstance(value, dict):
                raise RequestError("must be an object of JSON schemas", field=path)
            for name, each in value.items():
                _check(each, f"{path}.{name}", patterns, depth + 1)


def _check_alone(schema: dict[str, Any], field: str) -> None:
    first = next((keyword for keyword in ALONE if keyword in schema), None)
    if first is None:
        return
    beside = {keyword for keyword in schema if keyword != first and keyword in _KNOWN - ANNOTATIONS}
    values = [schema["const"]] if first == "const" else schema["enum"] if first == "enum" else None
    if "type" in beside and isinstance(values, list):
        types = _types(schema)
        wrong = next((value for value in values if not types & _types_of(value)), None)
        if wrong is not None:
            raise RequestError(f"{wrong!r} is not of the type beside it", field=f"{field}.{first}")
        beside.discard("type")
    if beside:
        raise RequestError(
            f"is not enforced beside {first}; write it into the schemas that {first} names",
            field=f"{field}.{min(beside)}",
        )


def _check_types(schema: dict[str, Any], field: str) -> None:
    types = _types(schema)
    for kind, keywords in OF_TYPE.items():
        needs = {"number", "integer"} if kind == "number" else {kind}
        if types & needs or (not types and kind in ("array", "object")):
            continue
        if used := sorted(keywords & schema.keys()):
            raise RequestError(f"is enforced only with the type {kind}", field=f"{field}.{used[0]}")


def _check_values(schema: dict[str, Any], field: str) -> None:
    for keyword in _COUNTS & schema.keys():
        value = schema[keyword]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            raise RequestError(f"must be an integer in [0, {MAX_COUNT}]", field=f"{field}.{keyword}")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise RequestError("must be # or begin with #/: other documents are not read", field=f"{field}.$ref")
    if "required" in schema:
        required, properties = schema["required"], schema.get("properties", {})
        if not isinstance(required, list):
            raise RequestError("must be a list of names", field=f"{field}.required")
        for name in required:
            if not isinstance(properties, dict) or name not in properties:
                raise RequestError(f"{name!r} must be in properties, too", field=f"{field}.required")


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", [])
    return {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}


def _types_of(value: Any) -> set[str]:
    """The names by which a schema can call the type of a value."""
    name = "null" if value is None else _TYPE_OF[type(value)]
    return {name, "number"} if name == "integer" else {name}
