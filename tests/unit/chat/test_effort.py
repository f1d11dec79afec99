"""`reasoning_effort` for templates that take some of its values alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from skyrl.base.types.context_limits import ContextLimits
from skyrl.chat.openai.generation import chat
from skyrl.chat.openai.messages import efforts_of, with_taken_effort
from tests.released_templates import CannotFetch, released_templates

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
HY3 = "{%- elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "taken"),
    [
        (HY3, ["high", "low", "no_think"]),
        ('{% if reasoning_effort not in ("low", "max", "sometimes") %}', ["low", "max"]),
        ("Reasoning: {{ reasoning_effort }}", []),
        ("{% if reasoning_effort in ['low'] %}", []),
        ("", []),
        (None, []),
    ],
)
def test_a_template_says_which_values_it_takes(template: str | None, taken: list[str]) -> None:
    assert list(efforts_of(template)) == taken


def test_the_nearest_value_is_given_and_of_two_the_higher() -> None:
    taken = efforts_of(HY3)
    given = {effort: with_taken_effort({"reasoning_effort": effort}, taken) for effort in EFFORTS}
    named = {
        effort: fields.get("reasoning_effort") or fields["chat_template_kwargs"]["reasoning_effort"]
        for effort, fields in given.items()
    }
    assert named == {
        "none": "no_think",
        "minimal": "low",
        "low": "low",
        "medium": "high",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }


def sent(fields: Mapping[str, Any], template: str) -> Mapping[str, Any]:
    request = chat(json.dumps({"messages": USER, **fields}).encode(), ContextLimits()).with_effort(efforts_of(template))
    body = json.loads(request.body("m", None))
    return {name: body[name] for name in ("reasoning_effort", "chat_template_kwargs") if name in body}


def test_a_request_keeps_its_other_arguments() -> None:
    arguments = {"enable_thinking": False, "is_training": True}
    fields = {"reasoning_effort": "medium", "chat_template_kwargs": arguments}
    assert sent(fields, HY3) == {"chat_template_kwargs": arguments | {"reasoning_effort": "high"}}
    assert sent(fields, "") == fields
    for plain in ({}, {"reasoning_effort": "low"}):
        assert sent(plain, HY3) == plain


@pytest.mark.slow
def test_no_released_template_refuses_an_effort() -> None:
    try:
        directory = released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")
    compiled = import_module("transformers.utils.chat_template_utils")._compile_jinja_template
    tried = 0
    for file in sorted(directory.glob("*.jinja")):
        template = file.read_text()
        made = compiled(template)
        values = {"messages": USER, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
        try:
            made.render(**values)
        except Exception:  # it needs arguments of its own
            continue
        for effort in EFFORTS:
            fields = with_taken_effort({"reasoning_effort": effort}, efforts_of(template))
            arguments = fields.get("chat_template_kwargs") or {"reasoning_effort": effort}
            assert made.render(**values, **arguments), (file.stem, effort)
        tried += 1
    assert tried >= 60
