"""Agent sessions on the chat templates of released models, and our renderers beside vLLM's own."""

from __future__ import annotations

import importlib
import json
import time
from collections import Counter
from typing import Any

import pytest

from skyrl.chat.agents.rendering.renderer import ChatTemplate, Setting, tools_of
from skyrl.chat.agents.rendering.vllm_renderers import DeepSeek, Harmony, Inkling
from tests.released_sessions.cookbook import FIGURES, measured
from tests.released_sessions.play import SPECIAL, Model
from tests.released_sessions.scripts import SYSTEM, TOOLS, called, result, said, user
from tests.released_templates import CannotFetch, released_templates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

CHAT = [SYSTEM, user("How many boats?"), called(0, True, 2, "I look."), result(0, 0), result(0, 1), called(1, True)]
CHATS = [
    CHAT[:2],
    CHAT[:5],
    [*CHAT, result(1)],
    [*CHAT, result(1), said(5, True), user("And now?")],
    [user("Hi"), said(1, False), user("And?")],
]


def test_no_turn_on_a_released_template_is_wrong() -> None:
    try:
        directory = released_templates()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")
    counts: Counter[str] = Counter()
    for file in sorted(directory.glob("*.jinja")):
        text = file.read_text()
        model = Model(ChatTemplate(text, SPECIAL), thinks="reasoning_content" in text or "</think>" in text)
        turns = model.play()
        counts.update(turn.outcome for turn in turns)
        bad = [turn for turn in turns if turn.outcome in ("wrong", "forks needlessly")]
        assert not bad, (file.stem, bad[0].script.name, bad[0].number, bad[0].note)
        assert all(turn.note for turn in turns if turn.outcome == "forks"), file.stem
    assert counts["exact"] > 3000, counts


def test_the_sessions_of_the_cookbooks_models_are_as_the_page_says() -> None:
    try:
        now = measured()
    except CannotFetch as error:
        pytest.skip(f"no released templates: {error}")
    assert now == json.loads(FIGURES.read_text()), "python -m tests.released_sessions.cookbook"
    assert sum(each["tool_loops"] == "exact" for each in now.values()) >= 40


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("effort", [None, "low"])
def test_gpt_oss_is_rendered_as_by_vllm(chat: list[Any], tools: bool, effort: str | None) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.entrypoints.openai.parser import harmony_utils

    system, rest = harmony_utils.extract_instructions_from_messages(chat)
    given: Any = [ChatCompletionToolsParam(**tool) for tool in TOOLS] if tools else None
    messages = harmony_utils.build_harmony_preamble(
        instructions=system, tools=given, reasoning_effort=effort, with_custom_tools=tools
    )
    messages += harmony_utils.parse_chat_inputs_to_harmony_messages(rest)
    expected = harmony_utils.get_encoding().decode(harmony_utils.render_for_completion(messages))
    arguments = {} if effort is None else {"reasoning_effort": effort}
    assert Harmony().render(chat, Setting(arguments, tools_of(TOOLS) if tools else None, time.time())) == expected


class _Untokenized:
    """Stands for a tokenizer whose chats are rendered as text."""

    def get_added_vocab(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
@pytest.mark.parametrize("arguments", [{}, {"thinking": True}, {"enable_thinking": False}, {"reasoning_effort": "low"}])
def test_deepseek_is_rendered_as_by_vllm(chat: list[Any], tools: bool, kind: str, arguments: dict[str, Any]) -> None:
    from vllm.renderers.chat_utils import _postprocess_messages

    module = importlib.import_module(f"vllm.tokenizers.{kind}")
    wrapped = getattr(module, f"get_{kind}_tokenizer")(_Untokenized())
    parsed: list[Any] = json.loads(json.dumps(chat))
    for message in parsed:
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]
    _postprocess_messages(parsed)
    given = tools_of(TOOLS) if tools else None
    expected = wrapped.apply_chat_template(parsed, given, conversation=parsed, tokenize=False, **arguments)
    assert DeepSeek(kind).render(chat, Setting(arguments, given)) == expected


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("effort", [None, "low"])
def test_inkling_is_rendered_as_by_vllm(chat: list[Any], effort: str | None) -> None:
    from vllm.renderers.inkling import _resolve_reasoning_effort
    from vllm.renderers.inkling_encoding import render_inkling_messages

    class Characters:
        """Characters are tokens, and special tokens have numbers beyond them."""

        def __init__(self) -> None:
            self.special: list[str] = []

        def encode_text(self, text: str) -> list[int]:
            return [ord(character) for character in text]

        def encode_special(self, token: str) -> int:
            if token not in self.special:
                self.special.append(token)
            return 0x110000 + self.special.index(token)

    characters = Characters()
    ids = render_inkling_messages(
        chat, characters, tools=tools_of(TOOLS), reasoning_effort=_resolve_reasoning_effort(effort)
    )
    expected = "".join(chr(each) if each < 0x110000 else characters.special[each - 0x110000] for each in ids)
    arguments = {} if effort is None else {"reasoning_effort": effort}
    assert Inkling().render(chat, Setting(arguments, tools_of(TOOLS))) == expected
