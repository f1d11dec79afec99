"""Every keyword of a JSON schema that an OpenAI request may use is enforced by xgrammar, which vLLM uses; the keywords
that xgrammar ignores are refused. xgrammar decides here itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl.base.wire.errors import RequestError
from skyrl.chat.openai.answer_shape import ALONE, ANNOTATIONS, MAX_COUNT, OF_TYPE, check_schema

xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, which comes with vLLM (make setup)")

INTEGER, OBJECT = {"type": "integer"}, {"type": "object"}
END = 0
A = {"properties": {"a": INTEGER}}
ENFORCED: list[tuple[str, Any, str, str]] = [
    ("type", INTEGER, "1", '"a"'),
    ("type", {"type": ["integer", "null"]}, "null", '"a"'),
    ("enum", {"type": "integer", "enum": [1, 2]}, "1", "3"),
    ("const", {"type": "string", "const": "x"}, '"x"', '"y"'),
    ("properties", OBJECT | A | {"required": ["a"]}, '{"a": 1}', '{"a": "x"}'),
    ("properties", A, '{"a": 1}', '{"a": "x"}'),
    ("required", OBJECT | A | {"required": ["a"]}, '{"a": 1}', "{}"),
    ("additionalProperties", OBJECT | A | {"additionalProperties": False}, '{"a": 1}', '{"b": 1}'),
    ("additionalProperties", OBJECT | {"additionalProperties": INTEGER}, '{"b": 1}', '{"b": "x"}'),
    ("unevaluatedProperties", OBJECT | A | {"unevaluatedProperties": INTEGER}, '{"b": 1}', '{"b": "x"}'),
    ("patternProperties", OBJECT | {"patternProperties": {"^a+$": INTEGER}}, '{"aa": 1}', '{"aa": "x"}'),
    ("propertyNames", OBJECT | {"propertyNames": {"type": "string", "pattern": "^a+$"}}, '{"aa": 1}', '{"b": 1}'),
    ("minProperties", OBJECT | {"additionalProperties": INTEGER, "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ("maxProperties", OBJECT | {"additionalProperties": INTEGER, "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ("items", {"type": "array", "items": INTEGER}, "[1]", '["x"]'),
    ("items", {"items": INTEGER}, "[1]", '["x"]'),
    ("prefixItems", {"type": "array", "prefixItems": [INTEGER, {"type": "string"}]}, '[1, "x"]', '["x", 1]'),
    ("minItems", {"type": "array", "items": INTEGER, "minItems": 2}, "[1, 2]", "[1]"),
    ("maxItems", {"type": "array", "items": INTEGER, "maxItems": 1}, "[1]", "[1, 2]"),
    ("unevaluatedItems", {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "[1]", "[1, 2]"),
    ("minLength", {"type": "string", "minLength": 2}, '"ab"', '"a"'),
    ("maxLength", {"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    ("pattern", {"type": "string", "pattern": "^a+$"}, '"aa"', '"b"'),
    ("format", {"type": "string", "format": "date"}, '"2024-01-01"', '"x"'),
    ("minimum", INTEGER | {"minimum": 3}, "3", "2"),
    ("maximum", {"type": "number", "maximum": 3}, "2.5", "3.1"),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 3}, "3.5", "3"),
    ("exclusiveMaximum", INTEGER | {"exclusiveMaximum": 3}, "2", "3"),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}, "title": "t"}, "1", '"x"'),
    ("$ref", {"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}, "1", '"x"'),
    ("anyOf", {"anyOf": [INTEGER, {"type": "null"}], "default": None}, "null", '"x"'),
    ("oneOf", {"oneOf": [INTEGER, {"type": "null"}]}, "null", '"x"'),
    ("allOf", {"allOf": [INTEGER]}, "1", '"x"'),
]

IGNORED: list[tuple[str, Any, str]] = [
    ("s.minimum", {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}, "3"),
    ("s.properties", OBJECT | A | {"anyOf": [{"type": "object"}]}, '{"a": "x"}'),
    ("s.enum", {"type": "string", "enum": ["a", 1]}, "1"),
    ("s.required", OBJECT | {"required": ["z"], "additionalProperties": True}, "{}"),
    ("s.not", {"not": INTEGER}, "1"),
    ("s.if", {"if": INTEGER, "then": {"type": "integer", "minimum": 3}}, "1"),
    ("s.uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]"),
    ("s.dependentRequired", OBJECT | A | {"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    ("s.$ref", {"$ref": "http://example.com/s.json"}, '"x"'),
    ("s.$ref", {"$ref": "#x", "$defs": {"a": INTEGER}}, '"x"'),
    ("s.minimum", {"minimum": 3}, "2"),
    ("s.minLength", {"minLength": 3}, '"a"'),
]
REFUSED: list[tuple[str, Any]] = [
    ("s", []),
    ("s", True),
    ("s.items", {"items": 3}),
    ("s.anyOf", {"anyOf": {}}),
    ("s.anyOf[1]", {"anyOf": [True, 7]}),
    ("s.properties", {"properties": []}),
    ("s.properties.a.items.not", {"properties": {"a": {"items": {"not": True}}}}),
    ("s.required", {"required": "a"}),
    ("s.required", {"properties": {}, "required": [["a"]]}),
    ("s.minItems", {"minItems": MAX_COUNT + 1}),
    ("s.maxLength", {"type": "string", "maxLength": -1}),
    ("s.maxItems", {"maxItems": True}),
    ("s.nullable", {"nullable": True}),
]


def accepts(schema: Any, text: str) -> bool:
    """Whether an answer of this text follows the grammar that xgrammar makes of the schema."""
    tokens = [chr(number) for number in range(128)]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    grammar = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(END)


@pytest.mark.parametrize(("keyword", "schema", "right", "wrong"), ENFORCED)
def test_an_accepted_keyword_is_enforced(keyword: str, schema: Any, right: str, wrong: str) -> None:
    check_schema(schema, "s", patterns=True)
    assert keyword in schema
    assert (accepts(schema, right), accepts(schema, wrong)) == (True, False)


def test_every_accepted_keyword_is_tried() -> None:
    assert {case[0] for case in ENFORCED} == {"type", *ALONE}.union(*OF_TYPE.values())


@pytest.mark.parametrize(("field", "schema", "wrong"), IGNORED)
def test_what_xgrammar_ignores_is_refused(field: str, schema: Any, wrong: str) -> None:
    assert accepts(schema, wrong), "xgrammar enforces it now: accept it"
    with pytest.raises(RequestError) as error:
        check_schema(schema, "s", patterns=True)
    assert error.value.field == field


@pytest.mark.parametrize(("field", "schema"), REFUSED)
def test_a_wrong_schema_is_refused(field: str, schema: Any) -> None:
    with pytest.raises(RequestError) as error:
        check_schema(schema, "s", patterns=True)
    assert error.value.field == field


def test_annotations_are_accepted_anywhere() -> None:
    check_schema(INTEGER | {name: {} for name in ANNOTATIONS} | {"x-order": 1}, "s", patterns=False)


def test_depth_is_bounded() -> None:
    def nested(depth: int) -> Any:
        return {"items": nested(depth - 1)} if depth else {}

    check_schema(nested(63), "s", patterns=False)
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        check_schema(nested(64), "s", patterns=False)
