"""When two messages are the same, and how two that are not differ.

A client repeats a conversation with each request, and not always to the letter: it merges text blocks, writes JSON in
another way, or changes something. Messages are compared by what the model would see of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.server.openai import system_messages
from skyrl.server.openai.fields import WITHOUT_EFFECT
from skyrl.server.openai.nested import tools_without_echoes

DIGEST_BYTES = 16
SETTING = ("tools", "chat_template_kwargs", "reasoning_effort", "documents")
"""Fields beside the messages that a template reads."""
_WITHOUT_EFFECT = WITHOUT_EFFECT | {"messages", "model", "store", "stream", "stream_options", *SETTING}
"""Fields that change nothing about an answer, or are in the digests already."""

_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class Print:
    """What is remembered of a message, to tell later how another one differs. `arguments` are digests of the tool
    calls' arguments, with their keys in order and with their keys sorted."""

    role: str
    text: bytes
    thinking: bytes | None = None
    calls: tuple[str, ...] = ()
    arguments: tuple[bytes, bytes] = (b"", b"")

    def digest(self, *, keep_thinking: bool) -> bytes:
        """Equal for two messages that are the same. With `keep_thinking` the thinking does not count."""
        thinking = None if keep_thinking else self.thinking
        parts = (self.role, self.text, b"" if thinking is None else thinking, self.calls, self.arguments[0])
        return digest(msgspec.msgpack.encode(parts))


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def setting_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion, beside the messages, on which the prompt's tokens depend."""
    setting = {name: fields[name] for name in SETTING if fields.get(name) not in (None, [], {})}
    if "tools" in setting:
        setting["tools"] = tools_without_echoes(setting["tools"])
    return setting


def setting_digest(setting: Mapping[str, Any]) -> bytes:
    return digest(_encode(setting))


def request_key(prefix: bytes, fields: Mapping[str, Any]) -> bytes:
    """The same for two requests that ask for the same: `prefix` is the digest of setting and messages."""
    options = {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT and value is not None}
    return digest(prefix, _encode(options))


def print_of(message: Mapping[str, Any]) -> Print:
    """Of an OpenAI chat message. It need not be well formed: requests are placed before they are checked."""
    role = str(message.get("role", ""))
    role = "system" if role in system_messages.ROLES else role
    text = text_of(message.get("content"))
    if role != "assistant":
        return Print(role, digest(text.encode(errors="surrogatepass")))
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "").strip()
    calls = functions_of(message)
    arguments = [_arguments(call.get("arguments")) for call in calls]
    return Print(
        role,
        digest(text.strip().encode(errors="surrogatepass")),
        digest(thinking.encode(errors="surrogatepass")) if thinking else None,
        tuple(str(call.get("name", "")) for call in calls),
        (_digest_of(arguments, sort=False), _digest_of(arguments, sort=True)) if calls else (b"", b""),
    )


def text_of(content: Any) -> str:
    """The text of a message's content. Text parts are joined as vLLM joins them, without the empty ones, and other
    parts are written out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = [part for part in content if isinstance(part, dict)]
    texts = (
        str(part.get("text") or "" if part.get("type") == "text" else part.get("refusal") or _encode(part).decode())
        for part in parts
    )
    return "\n".join(text for text in texts if text)


def functions_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that a message's tool calls call, each with its name and arguments."""
    given = message.get("tool_calls")
    calls = [call for call in given if isinstance(call, dict)] if isinstance(given, list) else []
    return [each if isinstance(each := call.get("function"), dict) else {} for call in calls]


def identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are written alike: then they have the same print, which takes longer to make."""
    if one != other:
        return False
    # Python takes True, 1 and 1.0 for equal. Text has none of them.
    return (isinstance(one.get("content"), str) and "tool_calls" not in one) or repr(one) == repr(other)


def _arguments(given: Any) -> Any:
    """The arguments of a tool call as a value: none are an empty object. Text that is no JSON stays text."""
    try:
        return _plain(json.loads(given or "{}") if given is None or isinstance(given, str) else given)
    except (ValueError, RecursionError):
        return given if isinstance(given, str) else None


def _plain(value: Any) -> Any:
    """Numbers as JavaScript writes them: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _digest_of(value: Any, *, sort: bool) -> bytes:
    return digest(json.dumps(value, sort_keys=sort, ensure_ascii=True).encode())
