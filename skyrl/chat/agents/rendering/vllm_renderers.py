"""Models whose chats vLLM writes with code instead of a chat template: DeepSeek V3.2, V4 and V4.1, Inkling, gpt-oss.

DeepSeek and Inkling: vLLM has the release's own code, in files that import nothing of vLLM; `module_of` reads them.
What vLLM puts around that code is here.

gpt-oss: vLLM writes its chats with OpenAI's library for the format, Harmony. What vLLM 0.32 puts around it is here:
which channel a message has, that earlier thoughts are dropped, and the header of a call, whose order the library has
changed since the model was trained.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from skyrl.chat.agents.rendering.renderer import CannotRender, Setting, prepared


@cache
def module_of(path: str) -> Any:
    """The module in a file, whose `path` is that within vLLM's package. Raises CannotRender if there is none."""
    found = importlib.util.find_spec("vllm")
    places = [] if found is None else found.submodule_search_locations or []
    file = next((file for place in places if (file := Path(place) / path).is_file()), None)
    spec = None if file is None else importlib.util.spec_from_file_location(f"skyrl_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise CannotRender(f"vLLM's {path} is not on this machine")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FILES = {
    "deepseek_v32": "deepseek_v32_encoding",
    "deepseek_v4": "deepseek_v4_encoding",
    "deepseek_v41": "deepseek_v41_encoding",
}
DEEPSEEK_KINDS = frozenset(_FILES)
"""The `model_type`s."""
_V4_EFFORTS = {"max": "max", "low": "low", "minimal": "low", "medium": "low"}


class DeepSeek:
    """A Renderer. `kind` is the `model_type`."""

    ends = ()
    has_system_role = True

    def __init__(self, kind: str) -> None:
        """Raises CannotRender if vLLM is not on this machine."""
        self._kind = kind
        self._encode = module_of(f"tokenizers/{_FILES[kind]}.py").encode_messages

    @property
    def variables(self) -> frozenset[str]:
        read = {"thinking", "enable_thinking"}
        return frozenset(read if self._kind == "deepseek_v32" else read | {"drop_thinking", "reasoning_effort"})

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        made = [prepared(message) for message in messages]
        given, tools = setting.arguments, setting.tools
        options = _v32(made, given, tools) if self._kind == "deepseek_v32" else self._v4(made, given, tools)
        try:
            return self._encode(made, **options)
        except Exception as error:  # the release's code asserts, and fails with any error
            raise CannotRender(f"{type(error).__name__}: {error}") from error

    def _v4(self, messages: list[dict[str, Any]], given: Mapping[str, Any], tools: Any) -> dict[str, Any]:
        if tools:
            system = next((message for message in messages if message["role"] == "system"), None)
            if system is None:
                system = {"role": "system", "content": ""} if self._kind == "deepseek_v41" else {"role": "system"}
                messages.insert(0, system)
            system["tools"] = tools
        named = [given[name] for name in ("thinking", "enable_thinking") if name in given]
        thinking, effort = not named or any(named), given.get("reasoning_effort")
        if effort == "none":
            thinking, effort = False, None
        if self._kind == "deepseek_v41":
            effort = effort or "high"
        else:
            effort = (_V4_EFFORTS.get(effort, "high") if isinstance(effort, str) else "high") if thinking else None
        return {
            "thinking_mode": "thinking" if thinking else "chat",
            "drop_thinking": given.get("drop_thinking", True),
            "reasoning_effort": effort,
        }


def _v32(messages: list[dict[str, Any]], given: Mapping[str, Any], tools: Any) -> dict[str, Any]:
    if tools:
        messages.insert(0, {"role": "system", "tools": tools})
    thinking = given.get("thinking") or given.get("enable_thinking")
    return {
        "thinking_mode": "thinking" if thinking else "chat",
        "drop_thinking": messages[-1]["role"] == "user",
    }


INKLING_KINDS = frozenset({"inkling_mm_model", "inkling2"})
"""The `model_type`s."""
_EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
_EFFORT = 0.9


class Inkling:
    """A Renderer."""

    variables = frozenset({"reasoning_effort"})
    ends = ()
    has_system_role = True

    def __init__(self) -> None:
        """Raises CannotRender if vLLM is not on this machine."""
        self._render = module_of("renderers/inkling_encoding.py").render_inkling_messages

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        asked = setting.arguments.get("reasoning_effort", _EFFORT)
        effort = _EFFORTS.get(asked) if isinstance(asked, str) else asked
        try:
            return "".join(self._render(messages, _Texts(), tools=setting.tools, reasoning_effort=effort))
        except Exception as error:  # it fails with any error on messages that it does not know
            raise CannotRender(f"{type(error).__name__}: {error}") from error


class _Texts:
    """Stands for a tokenizer: a text is its own token."""

    def encode_text(self, text: str) -> list[str]:
        return [text]

    def encode_special(self, token: str) -> str:
        return token


HARMONY_KINDS = frozenset({"gpt_oss"})
"""The `model_type`s."""
_CALL_HEADER = re.compile(
    r"<\|start\|>assistant<\|channel\|>(?P<channel>[^<]*?) to=(?P<to>[^<]*) <\|constrain\|>(?P<type>[^<]*)<\|message\|>"
)
_OLD_HEADER = r"<|start|>assistant to=\g<to><|channel|>\g<channel> \g<type><|message|>"


class Harmony:
    """A Renderer."""

    variables = frozenset({"reasoning_effort"})
    ends = ("<|end|>",)
    has_system_role = True

    def __init__(self) -> None:
        """Raises CannotRender if the library or its vocabulary is not on this machine."""
        _encoding()

    def render(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        import openai_harmony as harmony

        try:
            chat = harmony.Conversation.from_messages([*_preamble(messages, setting), *_chat(messages)])
            config = harmony.RenderConversationConfig(auto_drop_analysis=False)
            encoding = _encoding()
            ids = encoding.render_conversation_for_completion(chat, harmony.Role.ASSISTANT, config=config)
            return _CALL_HEADER.sub(_OLD_HEADER, encoding.decode_utf8(ids))
        except CannotRender:
            raise
        except Exception as error:  # the library is written in Rust, and raises bare exceptions
            raise CannotRender(f"{type(error).__name__}: {error}") from error


@cache
def _encoding() -> Any:
    """Raises CannotRender."""
    try:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # missing, or it cannot fetch its vocabulary
        raise CannotRender(f"openai-harmony: {error}") from error


def _preamble(messages: Sequence[Mapping[str, Any]], setting: Setting) -> Iterator[Any]:
    import openai_harmony as harmony

    content = harmony.SystemContent.new().with_conversation_start_date(setting.now.strftime("%Y-%m-%d"))
    if (effort := setting.arguments.get("reasoning_effort")) is not None:
        levels = {level.name.lower(): level for level in harmony.ReasoningEffort}
        if effort not in levels:
            raise CannotRender(f"Harmony does not know the reasoning_effort {effort!r}")
        content = content.with_reasoning_effort(levels[effort])
    yield harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)
    instructions = _text(messages[0]) if messages and messages[0]["role"] == "system" else None
    if not instructions and not setting.tools:
        return
    developer = harmony.DeveloperContent.new()
    if instructions is not None:
        developer = developer.with_instructions(instructions)
    if setting.tools:
        developer = developer.with_function_tools([_described(tool["function"]) for tool in setting.tools])
    yield harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)


def _described(function: Mapping[str, Any]) -> Any:
    import openai_harmony as harmony

    return harmony.ToolDescription.new(
        name=function["name"], description=function.get("description") or "", parameters=function.get("parameters")
    )


def _chat(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages behind the preamble. The thoughts before the last answer to the user are left out."""
    import openai_harmony as harmony

    made: list[Any] = []
    names: dict[Any, str] = {}
    for at, message in enumerate(messages):
        role = message["role"]
        if at == 0 and role == "system":
            continue
        if role == "assistant":
            made += _answer(message)
            names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        elif role == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, f"functions.{names.get(message.get('tool_call_id'), '')}")
            result = harmony.Message.from_author_and_content(author, _text(message) or "")
            made.append(result.with_channel("commentary").with_recipient("assistant"))
        else:
            made.append(harmony.Message.from_role_and_content(harmony.Role.USER, _text(message) or ""))
    last = max((at for at, each in enumerate(made) if each.channel == "final"), default=-1)
    return [each for at, each in enumerate(made) if at > last or each.channel != "analysis"]


def _answer(message: Mapping[str, Any]) -> Iterator[Any]:
    import openai_harmony as harmony

    def said(text: str, channel: str) -> Any:
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)

    text, calls = _text(message), message.get("tool_calls") or ()
    thinking = message.get("reasoning") or message.get("reasoning_content")
    if text and calls:
        yield said(text, "commentary")
    if thinking:
        yield said(thinking, "analysis")
    for call in calls:
        function = call["function"]
        asked = said(function.get("arguments") or "", "commentary")
        yield asked.with_recipient(f"functions.{function['name']}").with_content_type("json")
    if text and not calls:
        yield said(text, "final")


def _text(message: Mapping[str, Any]) -> str | None:
    """vLLM joins text parts without anything between them here."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and part.get("text") is not None]
    return "".join(texts) if texts else None
