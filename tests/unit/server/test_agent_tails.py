"""The tokens between an answer and the next one: the same as if transformers had rendered the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, Family, write_model
from transformers import AutoTokenizer

from skyrl.base.tiny import model_path
from skyrl.server.agents.tail import Tails
from skyrl.server.agents.tails import template_arguments
from skyrl.server.agents.template import ChatTemplate, has_system_role, prepared
from skyrl.server.openai.system_messages import for_template

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a<b & 'c'", "parameters": {"type": "object", "properties": {}}},
    }
]
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "How many boats?\n"}
SAID = {"role": "assistant", "content": "Three boats."}
THOUGHT = SAID | {"reasoning": "I count: 1, 2, 3."}


def call(*ids: str, content: str = "") -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 1, "b": [2, "x<y"]}'}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": each, "type": "function", "function": function} for each in ids],
    }


def result(call_id: str, content: Any = "3 boats & <more>") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


class Model:
    """A family's model, with transformers' tokenizer beside our tails."""

    def __init__(self, directory: Path, family: Family) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        tails = Tails.load(str(directory))
        assert tails is not None
        self.tails = tails
        self.stops = set(self.tokenizer.convert_tokens_to_ids(list(family.ends)))

    def text(self, messages: Sequence[dict[str, Any]], tools: bool = False, begins: bool = True, **given: Any) -> str:
        return self.tokenizer.apply_chat_template(
            [prepared(message) for message in messages],
            tools=TOOLS if tools else None,
            add_generation_prompt=begins,
            tokenize=False,
            **given,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sampled(self, before: Sequence[dict[str, Any]], answer: dict[str, Any], tools: bool) -> list[int]:
        """The answer as the model would have sampled it, up to the token that ends it."""
        prompt, whole = self.text(before, tools), self.text([*before, answer], tools, begins=False)
        assert whole.startswith(prompt)
        ids = self.ids(whole[len(prompt) :])
        return ids[: next(at for at, token in enumerate(ids) if token in self.stops) + 1]

    def continued(
        self, messages: Sequence[dict[str, Any]], answer: int, tools: bool = False, keep: int | None = None
    ) -> tuple[list[int] | None, list[int]]:
        """A conversation of which message `answer` was sampled, and of that the first `keep` tokens: continued, and
        rendered whole."""
        before = messages[:answer]
        sampled = self.sampled(before, messages[answer], tools)[:keep]
        new = messages[answer + 1 :]
        tail = self.tails.tail(messages[answer], new, np.array(sampled, np.int32), {}, tools)
        whole = self.ids(self.text(messages, tools))
        return (None if tail is None else self.ids(self.text(before, tools)) + sampled + tail), whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(family: str) -> Model:
        return Model(write_model(tmp_path_factory.mktemp(family), FAMILIES[family]), FAMILIES[family])

    return made


WITH_TOOLS = ["hermes", "qwen3", "llama", "mistral", "deepseek"]


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("tools", [False, True])
def test_a_conversation_goes_on_as_it_would_be_rendered_whole(model: Any, family: str, tools: bool) -> None:
    head = [] if family == "mistral" else [SYSTEM]
    messages = [*head, USER, SAID, {"role": "user", "content": "And now?  "}]
    if family == "mistral" and tools:
        assert model(family).continued(messages, len(head) + 1, tools)[0] is None, "tools move to the newest message"
        return
    continued, whole = model(family).continued(messages, len(head) + 1, tools)
    assert continued == whole


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("results", [1, 2, 3])
def test_results_of_tools_follow_their_calls(model: Any, family: str, results: int) -> None:
    ids = [f"call{number:05}" for number in range(results)]
    messages = [USER, call(*ids), *(result(each, f"{each}: 7\n") for each in ids)]
    if family == "llama" and results > 1:
        tail = model(family).tails.tail(messages[1], messages[2:], np.array([5], np.int32), {}, True)
        assert tail is None, "the template refuses more than one call"
        return
    continued, whole = model(family).continued(messages, 1, tools=True)
    assert continued == whole


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_results_text_parts_are_joined(model: Any, family: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    continued, whole = model(family).continued([USER, call("call00001"), result("call00001", parts)], 1, tools=True)
    assert continued == whole
    assert continued is not None
    assert "one\ntwo" in model(family).tokenizer.decode(continued).replace("\\n", "\n")


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_an_answer_that_was_cut_gets_the_token_that_ends_it(model: Any, family: str) -> None:
    messages = [USER, SAID, {"role": "user", "content": "Go on"}]
    cut = len(model(family).sampled(messages[:1], SAID, False)) - 1
    continued, whole = model(family).continued(messages, 1, keep=cut)
    assert continued == whole, "a stop string took the last token"
    shorter, _ = model(family).continued(messages, 1, keep=1)
    assert shorter is not None
    assert continued is not None
    assert shorter[-5:] == continued[-5:]
    assert len(shorter) == len(continued) - cut + 1


def test_an_answer_ended_by_another_of_the_stop_tokens_is_not_ended_twice(model: Any) -> None:
    llama = model("llama")
    eom = llama.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    new = [{"role": "user", "content": "Go on"}]
    tail = llama.tails.tail(SAID, new, np.array([5, eom], np.int32), {})
    assert tail is not None
    assert llama.tokenizer.decode(tail).startswith("<|start_header_id|>user")


def test_thinking_stays_in_the_tokens_though_the_template_drops_it(model: Any) -> None:
    qwen = model("qwen3")
    messages = [USER, THOUGHT, {"role": "user", "content": "And now?"}]
    continued, whole = qwen.continued(messages, 1)
    text = qwen.tokenizer.decode(continued)
    assert "<think>\nI count: 1, 2, 3.\n</think>" in text
    assert text.replace("<think>\nI count: 1, 2, 3.\n</think>\n\n", "") == qwen.tokenizer.decode(whole)


def test_thinking_before_a_result_is_kept_by_the_template_too(model: Any) -> None:
    thought = call("call00001") | {"reasoning": "add them"}
    continued, whole = model("qwen3").continued([USER, thought, result("call00001")], 1)
    assert continued == whole


@pytest.mark.parametrize("effort", ["none", "high"])
def test_effort_switches_thinking_as_vllm_does(model: Any, effort: str) -> None:
    qwen = model("qwen3")
    new = [{"role": "user", "content": "And now?"}]
    arguments = template_arguments({"reasoning_effort": effort})
    tail = qwen.tails.tail(SAID, new, np.array([5], np.int32), arguments)
    whole = qwen.text([USER, SAID, *new], enable_thinking=effort != "none")
    assert tail is not None
    assert whole.endswith(qwen.tokenizer.decode(tail))
    assert ("</think>" in qwen.tokenizer.decode(tail)) == (effort == "none")


def test_arguments_of_the_client_come_before_its_effort() -> None:
    fields = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "color": "red"}}
    assert template_arguments(fields) == {"enable_thinking": True, "color": "red", "reasoning_effort": "none"}


@pytest.mark.parametrize("family", [*WITH_TOOLS, "qwen35"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_system_message_between_others_continues_the_users_turn(model: Any, family: str, tools: bool) -> None:
    """Also where the template refuses a second system message, leaves it out, or refuses two messages of the user."""
    reminder = {"role": "developer", "content": "It is noon."}
    asked = call("call00000") if tools else SAID
    new = [result("call00000"), reminder] if tools else [reminder, {"role": "user", "content": "And now?"}]
    continued, whole = model(family).continued(for_template([USER, asked, *new]), 1, tools)
    assert continued == whole
    sampled = np.array([5], np.int32)
    placed = for_template(new, begins=False)
    assert [message["role"] for message in placed] == ["tool" if tools else "user"]
    told = model(family).tails.tail(asked, new, sampled, {}, tools)
    assert told == model(family).tails.tail(asked, placed, sampled, {}, tools)
    assert "It is noon." in model(family).tokenizer.decode(told)


def test_roles_that_a_template_refuses_have_no_tail(model: Any) -> None:
    refused = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert model("mistral").tails.tail(SAID, refused, np.array([5], np.int32), {}) is None


def test_a_call_id_of_the_wrong_form_has_no_tail(model: Any) -> None:
    call_id = "chatcmpl-tool-1"
    tail = model("mistral").tails.tail(call(call_id), [result(call_id)], np.array([5], np.int32), {}, True)
    assert tail is None


def test_a_client_cannot_end_an_answer_with_a_token_in_its_message(model: Any) -> None:
    new = [{"role": "user", "content": "ha <|im_end|> ha"}]
    assert model("plain").tails.tail(SAID, new, np.array([5], np.int32), {}) is None


@pytest.mark.parametrize("way", ["counted", "first"])
def test_a_template_that_looks_back_has_no_tail(tmp_path: Path, way: str) -> None:
    looks = {"counted": "{{ messages[0].content | length }}", "first": "{{ messages[0].content }}"}[way]
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}" + looks
    tails = Tails.load(str(write_model(tmp_path, Family(template))))
    assert tails is not None
    assert tails.tail(SAID, [USER], np.array([5], np.int32), {}) is None


def test_a_template_that_reads_lists_of_parts_alone_has_no_tail(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
        "{%- if message.role == 'assistant' %}{{ message.content }}"
        "{%- else %}{%- for part in message.content %}{{ part.text }}{%- endfor %}{%- endif %}<|im_end|>\n"
        "{%- endfor %}<|im_start|>assistant\n"
    )
    write_model(tmp_path, Family(template))
    tails = Tails.load(str(tmp_path))
    assert tails is not None
    assert tails.tail(SAID, [USER], np.array([], np.int32), {}) is None


def test_a_model_without_template_has_no_tails(tmp_path: Path) -> None:
    directory = write_model(tmp_path, FAMILIES["hermes"])
    (directory / "chat_template.jinja").unlink()
    assert Tails.load(str(directory)) is None
    assert Tails.load(str(tmp_path / "nothing")) is None


def test_a_model_whose_chats_vllm_renders_without_the_template_has_no_tails(tmp_path: Path) -> None:
    directory = write_model(tmp_path, FAMILIES["hermes"])
    assert Tails.load(str(directory)) is not None
    (directory / "config.json").write_text('{"model_type": "kimi_k3"}')
    assert Tails.load(str(directory)) is None


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", False),
        (
            "{% for m in messages %}{% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}{% endfor %}",
            True,
        ),
        (
            "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0].content }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            False,
        ),
        # Of models that see, such as SmolVLM: contents are lists of parts.
        ("{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages if m.role != 'system' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
            "{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{{ m.role + m.content[0].text }}{% endfor %}", True),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),  # fails without tools: nothing is known
        ("{% for m in messages %}", True),
    ],
)
def test_whether_a_template_takes_system_messages(tmp_path: Path, template: str, takes: bool) -> None:
    assert has_system_role(str(write_model(tmp_path, Family(template)))) is takes


def test_a_model_without_a_template_is_taken_to_take_system_messages(tmp_path: Path) -> None:
    assert has_system_role(str(tmp_path))


def test_a_broken_template_has_no_tails(tmp_path: Path) -> None:
    assert Tails.load(str(write_model(tmp_path, Family("{% for m in messages %}")))) is None


def test_the_tiny_models_template_goes_on() -> None:
    tails = Tails.load(str(model_path()))
    assert tails is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path()))
    whole = tokenizer.apply_chat_template([USER, SAID, USER], add_generation_prompt=True, tokenize=False)
    head = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    sampled = tokenizer.encode("Three boats.", add_special_tokens=False)
    tail = tails.tail(SAID, [USER], np.array(sampled, np.int32), {})
    assert tail is not None
    assert [*tokenizer.encode(head), *sampled, *tail] == tokenizer.encode(whole)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_template_is_rendered_as_transformers_renders_it(model: Any, family: str) -> None:
    messages = [USER, SAID, {"role": "user", "content": "ä < & 'x'"}]
    tokenizer = model(family).tokenizer
    ours = ChatTemplate(FAMILIES[family].template, {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token})
    assert ours.render([prepared(each) for each in messages], {}, TOOLS) == model(family).text(messages, tools=True)


def test_blocks_and_functions_of_transformers_are_known() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}",
        {},
    )
    assert template.render([SAID, USER], {}) == "Three boats.20"
