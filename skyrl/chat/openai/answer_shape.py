"""What an answer must look like (`response_format`, `structured_outputs`, tools that must be called), and how large it
may be.

The fields that say so are checked and bounded here, because vLLM would ignore a part of them, and pays for large ones
with time. `grammars` is whether regular expressions and grammars are accepted. A JSON schema is checked keyword by
keyword: xgrammar, which makes vLLM's grammars, ignores what it does not enforce, and an ignored keyword would change
the meaning of a request in silence. tests/component/api/test_enforced_schemas.py tries every keyword with xgrammar
itself.

`Size` is the size of a request. Its bounds are those of `asample` (`skyrl.sampling.job`, `skyrl.sampling.exchanges`),
over all prompts of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from skyrl.base.wire.errors import RequestError
from skyrl.sampling.exchanges import (
    BASE_BYTES,
    ECHOED_TOKEN_BYTES,
    MAX_ANSWER_BYTES,
    PROMPT_CELL_BYTES,
    SAMPLED_TOKEN_BYTES,
    SEQUENCE_BYTES,
)
from skyrl.sampling.job import MAX_ECHOED, MAX_NUM_SAMPLES, MAX_PROMPT_CELLS, MAX_SAMPLED, MAX_TOPK

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
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
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


TOKEN_BYTES = 2 * SAMPLED_TOKEN_BYTES
"""A sampled token with its logprob, and in a stream its event: ids, names and usage come with every token. A chat also
lists the bytes of each token."""


@dataclass(frozen=True, slots=True)
class Size:
    """`most_prompt` and `likely_prompt` are numbers of tokens of all prompts together: at most, and about.
    `max_tokens` is for each sequence; None if it is not known. `topk` and `prompt_topk` are best tokens per position;
    `prompt_topk` None is no logprobs of the prompt. `topk_field` and `tokens_field` name `topk` and `max_tokens` in the
    request."""

    prompts: int
    n: int
    most_prompt: int
    likely_prompt: int
    max_tokens: int | None
    topk: int
    prompt_topk: int | None
    topk_field: str
    tokens_field: str = "max_tokens"

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request can use; an unknown `max_tokens` counts as 0."""
        return self.most_prompt + self.sequences * (self.max_tokens or 0)

    @property
    def answer_bytes(self) -> int:
        """The largest right answer."""
        if self.max_tokens is None:
            return MAX_ANSWER_BYTES
        echoed = self.n * self.most_prompt
        cells = 0 if self.prompt_topk is None else echoed * (2 + self.prompt_topk)
        sampled = self.sequences * self.max_tokens * (1 + self.topk) * TOKEN_BYTES
        size = BASE_BYTES + self.sequences * SEQUENCE_BYTES + echoed * (ECHOED_TOKEN_BYTES + TOKEN_BYTES) + sampled
        return min(MAX_ANSWER_BYTES, size + cells * PROMPT_CELL_BYTES)


def check_size(size: Size, logprob_token_ids: Sequence[int] | None) -> None:
    """Raises RequestError naming the field."""
    _check_range("n", size.n, 1, MAX_NUM_SAMPLES)
    if size.max_tokens is not None and size.max_tokens < 0:
        raise RequestError(f"must be at least 0, got {size.max_tokens}", field=size.tokens_field)
    _check_range(size.topk_field, size.topk, 0, MAX_TOPK)
    _check_range("prompt_logprobs", size.prompt_topk or 0, 0, MAX_TOPK)
    if logprob_token_ids is not None and len(logprob_token_ids) > MAX_TOPK:
        raise RequestError(f"must hold at most {MAX_TOPK} ids, got {len(logprob_token_ids)}", field="logprob_token_ids")
    columns = 1 + max(size.topk, len(logprob_token_ids or ()))
    if size.sequences * (size.max_tokens or 1) * columns > MAX_SAMPLED:
        raise RequestError(
            f"{size.sequences} choices of up to {size.max_tokens} tokens, with {columns} logprobs each, are more than "
            f"the {MAX_SAMPLED} that one request may ask for",
            field="n" if size.n > 1 else size.tokens_field,
        )
    check_prompt(size)


def check_prompt(size: Size) -> None:
    """What depends on the length of the prompt. Raises RequestError naming the field."""
    if size.n * size.most_prompt > MAX_ECHOED:
        raise RequestError(
            f"{size.n} choices for prompts of up to {size.most_prompt} tokens are more than one request may ask for",
            field="n",
        )
    if size.prompt_topk is not None and size.n * size.most_prompt * (1 + size.prompt_topk) > MAX_PROMPT_CELLS:
        raise RequestError(
            f"prompts of up to {size.most_prompt} tokens with {1 + size.prompt_topk} logprobs each, for {size.n} "
            f"choices, are more than the {MAX_PROMPT_CELLS} that one request may ask for",
            field="prompt",
        )


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"must be in [{low}, {high}], got {value}", field=field)
