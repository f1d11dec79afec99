"""The parsers of released models: an answer that the released template writes is read back, whole and streamed.

Each template renders an answer with thoughts and calls. What stands behind the prompt is the model's answer, and vLLM's
parsers must give back what went in. The tokenizer is one of single bytes, with the markers as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl.inference.parsers import ONE_LLAMA_CALL, WRITTEN_THOUGHTS, parsers_of
from tests.released_templates import CannotFetch, released_templates
from tests.unit.inference.reading import ENDS, Read, read, tokenizer_of, use_plugin
from tests.unit.inference.released_models import LLAMA, MODELS, Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

THOUGHTS, TEXT, LAST = "Hm, let me see.", "I look.", "It is fine."
CALLS = (("weather", {"city": "Rome", "days": 2}), ("tides", {"city": "Oslo", "days": 1}))
IDS = ("call00000", "call00001")
"""Of the length that Mistral's templates want."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Which."},
        "days": {"type": "integer", "description": "How many."},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Tells the {name}.", "parameters": PARAMETERS}}
    for name, _ in CALLS
]


@pytest.fixture(scope="module")
def templates() -> Path:
    try:
        return released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    use_plugin()


def test_every_released_template_has_its_parsers(templates: Path) -> None:
    assert sorted(MODELS) == sorted(file.stem for file in templates.glob("*.jinja"))
    chosen = {name: parsers_of(model.kind, (templates / f"{name}.jinja").read_text()) for name, model in MODELS.items()}
    assert chosen == {name: (model.calls, model.thoughts) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.read])
def test_an_answer_is_read_back(templates: Path, name: str) -> None:
    model = MODELS[name]
    template = (templates / f"{name}.jinja").read_text()
    if model.most:
        one, more = (answered(model, template, text, number) for text, number in ((None, 1), (TEXT, model.most)))
        assert one == (said(model), None, [*CALLS[:1]])
        assert more == (said(model), TEXT if model.keeps_text else None, [*CALLS[: model.most]])
    assert answered(model, template, LAST, 0) == (said(model), LAST, [])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.thoughts == WRITTEN_THOUGHTS])
def test_an_answer_without_thoughts_is_content(templates: Path, name: str) -> None:
    template = (templates / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(MODELS[name].markers, special=False)
    prompt = rendered(tokenizer, template, None, {})
    parsers = (MODELS[name].calls, WRITTEN_THOUGHTS)
    assert read(parsers, tokenizer, TOOLS, LAST, prompt=prompt) == (None, LAST, [])
    assert read(parsers, tokenizer, TOOLS, "Hm", prompt=f"{prompt}<think>\n") == ("Hm", None, [])
    assert read(parsers, tokenizer, TOOLS, LAST, prompt=f"{prompt}<think>\n\n</think>\n\n") == (None, LAST, [])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model is LLAMA])
def test_of_several_calls_that_the_template_refuses_the_first_is_given(templates: Path, name: str) -> None:
    template = (templates / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(LLAMA.markers, special=False)
    with pytest.raises(Exception, match="only supports single tool-calls"):
        rendered(tokenizer, template, (None, None, CALLS), {})
    prompt = rendered(tokenizer, template, None, {})
    answer = "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in CALLS)
    seen = read((ONE_LLAMA_CALL, None), tokenizer, TOOLS, answer, prompt=prompt)
    assert seen is not None
    assert seen == (None, None, [CALLS[0]])
    assert rendered(tokenizer, template, (None, None, seen[2]), {}).startswith(prompt)


def said(model: Model) -> str | None:
    return None if model.thoughts is None else THOUGHTS


def answered(model: Model, template: str, text: str | None, calls: int) -> Read:
    """Thoughts, text and calls that vLLM reads in an answer as the model writes it."""
    arguments = dict(model.arguments or {})
    for special in (True, False):
        tokenizer = tokenizer_of(model.markers, special=special)
        prompt = rendered(tokenizer, template, None, arguments)
        shown = () if model.writes else CALLS[:calls]
        whole = rendered(tokenizer, template, (said(model), text, shown), arguments)
        left_out = model.written is not None and THOUGHTS not in whole
        begun = without_thoughts(prompt) if left_out and not whole.startswith(prompt) else prompt
        assert whole.startswith(begun), (begun[-99:], whole[-999:])
        answer = whole[len(begun) :]
        if model.written and left_out:
            answer = model.written.format(THOUGHTS) + answer.removeprefix("<think>").removeprefix("</think>")
        answer = ended(answer)
        if model.writes and calls:
            answer += model.writes(CALLS[:calls])
        read_after = partial(
            read,
            (model.calls, model.thoughts),
            tokenizer,
            TOOLS,
            answer,
            arguments=arguments,
            special=special,
            whole_text=model.keeps_text,
        )
        seen = read_after(prompt=prompt)
        if seen is not None:
            later = f"{prompt}{answer}{whole[len(begun) :].removeprefix(answer)}{prompt}"
            assert read_after(prompt=later) == seen, "after an earlier answer"
            return seen
    raise AssertionError("no tokenizer fits")


def without_thoughts(prompt: str) -> str:
    """The prompt without the beginning of thoughts at its end."""
    for mark in ("<think>", "<|channel>"):
        if (at := prompt.rfind(mark)) > len(prompt) - 40:
            return prompt[:at]
    return prompt


def ended(answer: str) -> str:
    answer = answer.removesuffix("<|message_sep|>\n\n")
    ends = [at for end in ENDS if (at := answer.find(end)) >= 0]
    return answer[: min(ends)] if ends else answer


def rendered(
    tokenizer: Any, template: str, answer: tuple[str | None, str | None, Sequence[Any]] | None, arguments: Any
) -> str:
    """The text of a question, with the beginning of an answer or with the whole `answer`, as vLLM renders it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
    if answer is not None:
        thoughts, text, calls = answer
        message: dict[str, Any] = {"role": "assistant", "content": text or ""}
        if thoughts is not None:
            message |= {"reasoning": thoughts, "reasoning_content": thoughts}
        if calls:
            message["tool_calls"] = [
                {"id": number, "type": "function", "function": {"name": name, "arguments": given}}
                for number, (name, given) in zip(IDS, calls, strict=False)
            ]
        messages.append(message)
    return tokenizer.apply_chat_template(
        messages, TOOLS, chat_template=template, tokenize=False, add_generation_prompt=answer is None, **arguments
    )
