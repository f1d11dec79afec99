"""The tree of a session's turns: where a request belongs, and which tokens came before it.

Tokens are the truth, and messages are the index to them. A turn is found by the digest of its messages and its answer;
a request continues the longest turn that its own messages begin with.

A client repeats a conversation with each request, and not always to the letter: it merges text blocks, writes JSON in
another way, or changes something. So messages are compared by what the model would see of them: a `MessageFingerprint`
says whether two are the same, and how two that are not differ. Knows no template and no database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentTurn, ForkReason
from skyrl.chat.openai.fields import WITHOUT_EFFECT, tools_without_echoes
from skyrl.chat.openai.messages import ROLES

DIGEST_BYTES = 16
SETTING = ("tools", "chat_template_kwargs", "reasoning_effort", "documents")
"""Fields beside the messages that a template reads."""
_WITHOUT_EFFECT = WITHOUT_EFFECT | {"messages", "model", "store", "stream", "stream_options", *SETTING}
"""Fields that change nothing about an answer, or are in the digests already."""

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class MessageFingerprint:
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
    return digest(_encode_sorted(setting))


def request_key(prefix: bytes, fields: Mapping[str, Any]) -> bytes:
    """The same for two requests that ask for the same: `prefix` is the digest of setting and messages."""
    options = {name: value for name, value in fields.items() if name not in _WITHOUT_EFFECT and value is not None}
    return digest(prefix, _encode_sorted(options))


def fingerprint_of(message: Mapping[str, Any]) -> MessageFingerprint:
    """Of an OpenAI chat message. It need not be well formed: requests are placed before they are checked."""
    role = str(message.get("role", ""))
    role = "system" if role in ROLES else role
    text = text_of(message.get("content"))
    if role != "assistant":
        return MessageFingerprint(role, digest(text.encode(errors="surrogatepass")))
    thinking = str(message.get("reasoning") or message.get("reasoning_content") or "").strip()
    calls = functions_of(message)
    arguments = [_arguments(call.get("arguments")) for call in calls]
    return MessageFingerprint(
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
        str(
            part.get("text") or ""
            if part.get("type") == "text"
            else part.get("refusal") or _encode_sorted(part).decode()
        )
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


_CHANGED: Mapping[str, ForkReason] = {
    "system": "system_changed",
    "user": "user_changed",
    "tool": "tool_result_changed",
}
_encode = msgspec.json.Encoder().encode
TURN_BYTES, MESSAGE_BYTES = 1200, 600
"""About what a turn and a message take in memory beside arrays and texts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs. `new` are its messages after the answer of `parent`; all if there is none. `prefix` is
    the digest of all its messages. `fork` and `forked_at` are those of `AgentTurn`."""

    parent: AgentTurn | None
    new: list[dict[str, Any]]
    prefix: bytes
    fork: ForkReason | None
    forked_at: int | None


@dataclass(slots=True)
class _Node:
    """A turn in the tree. `end` is the digest of its messages and its answer, `length` the number of tokens up to the
    end of its answer, `messages` that of messages, the answer among them."""

    turn: AgentTurn
    end: bytes
    length: int
    messages: int
    children: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """A request's messages with their prints. `digests` are those of the setting alone, with the first message, with
    the first two, and so on. It is never changed: large requests are read in threads."""

    begins: tuple[bytes, bool]
    messages: list[dict[str, Any]]
    prints: list[MessageFingerprint]
    digests: list[bytes]


class Tree:
    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        """By id, in the order in which they ended."""
        self._by_end: dict[bytes, _Node] = {}
        """The newest turn of each end."""
        self._by_key: dict[bytes, list[AgentTurn]] = {}
        self._known: dict[bytes, list[MessageFingerprint]] = {}
        """The messages that were seen after the same beginning, by its digest."""
        self._seen: set[bytes] = set()
        """The digests of all beginnings, those of complete turns among them."""
        self._asked: set[bytes] = set()
        """The digests of all requests' messages."""
        self._whole: tuple[str, NDArray[np.int32]] | None = None
        """The tokens of the turn that was asked for last."""
        self._last: _Read | None = None
        """The request that was placed last: the next one most often begins with it, and only the rest is new."""
        self.tokens = 0
        """Each turn's `added` and `sampled`."""
        self.nbytes = 0
        """About what the tree takes in memory."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[AgentTurn]:
        return (node.turn for node in self._nodes.values())

    def get(self, turn_id: str) -> AgentTurn | None:
        node = self._nodes.get(turn_id)
        return None if node is None else node.turn

    def add(self, turn: AgentTurn, keep_thinking: bool) -> None:
        """Add a turn whose parent is in the tree. A turn that is there already changes nothing."""
        if turn.id in self._nodes:
            return
        parent = None if turn.parent is None else self._nodes[turn.parent]
        end = setting_digest(turn.setting) if parent is None else parent.end
        messages = [*turn.messages, turn.answer]
        for message in messages:
            if message is turn.answer:
                self._asked.add(end)
            printed = fingerprint_of(message)
            known = self._known.setdefault(end, [])
            if printed not in known:
                known.append(printed)
            end = digest(end, printed.digest(keep_thinking=keep_thinking))
            self._seen.add(end)
        before = (0, 0) if parent is None else (parent.length, parent.messages)
        node = _Node(turn, end, before[0] + len(turn.added) + len(turn.sampled), before[1] + len(messages))
        if parent is not None:
            parent.children += 1
        self._nodes[turn.id] = self._by_end[end] = node
        self._by_key.setdefault(turn.key, []).append(turn)
        self.tokens += len(turn.added) + len(turn.sampled)
        arrays = turn.added.nbytes + turn.sampled.nbytes + turn.logprobs.nbytes + len(turn.routed_experts or b"")
        texts = len(_encode([turn.setting, messages]))
        self.nbytes += TURN_BYTES + MESSAGE_BYTES * len(messages) + arrays + texts

    def place(self, setting: Mapping[str, Any], messages: Sequence[dict[str, Any]], keep_thinking: bool) -> Place:
        """Where a request with these messages belongs."""
        read = self._read(setting, messages, keep_thinking)
        prints, digests = read.prints, read.digests
        at = next((at for at in range(len(messages), 0, -1) if digests[at] in self._by_end), 0)
        if at == len(messages) and not _is_cut(self._by_end[digests[at]].turn):
            # The answer is repeated as it was, and another one is asked for: only a template can say what that means.
            at = next((at for at in range(at - 1, 0, -1) if digests[at] in self._by_end), 0)
        node = self._by_end[digests[at]] if at else None
        fork, forked_at = self._fork(digests, prints, node)
        return Place(None if node is None else node.turn, list(messages[at:]), digests[-1], fork, forked_at)

    def answered(self, key: bytes) -> Sequence[AgentTurn]:
        """The turns that answered requests with this key, in the order in which they were asked for, and the choices of
        one answer in theirs: the database may hold those in another order."""
        return sorted(self._by_key.get(key, ()), key=lambda turn: turn.attempt)

    def has_child(self, turn: AgentTurn) -> bool:
        return self._nodes[turn.id].children > 0

    def length(self, turn: AgentTurn) -> int:
        """Tokens up to the end of a turn's answer."""
        return self._nodes[turn.id].length

    def tokens_of(self, turn: AgentTurn) -> NDArray[np.int32]:
        """All token ids up to the end of a turn's answer, of shape [length]. The caller must not change them."""
        if self._whole is not None and self._whole[0] == turn.id:
            return self._whole[1]
        parts: list[NDArray[np.int32]] = []
        at: str | None = turn.id
        while at is not None:
            if self._whole is not None and self._whole[0] == at:
                parts.append(self._whole[1])
                break
            node = self._nodes[at]
            parts += [node.turn.sampled, node.turn.added]
            at = node.turn.parent
        whole = np.concatenate(parts[::-1])
        self._whole = (turn.id, whole)
        return whole

    def messages_of(self, turn: AgentTurn) -> list[dict[str, Any]]:
        """All messages of the request that a turn answered."""
        path = self.path(turn)
        messages: list[dict[str, Any]] = []
        for each in path:
            messages += each.messages
            if each is not turn:
                messages.append(each.answer)
        return messages

    def path(self, turn: AgentTurn) -> list[AgentTurn]:
        """The turns from the first one to this one."""
        path = [turn]
        while path[-1].parent is not None:
            path.append(self._nodes[path[-1].parent].turn)
        return path[::-1]

    def _read(self, setting: Mapping[str, Any], messages: Sequence[dict[str, Any]], keep_thinking: bool) -> _Read:
        begins, last, same = (setting_digest(setting), keep_thinking), self._last, 0
        if last is None or last.begins != begins:
            last = _Read(begins, [], [], [begins[0]])
        for old, new in zip(last.messages, messages, strict=False):
            if not identical(old, new):
                break
            same += 1
        read = _Read(begins, last.messages[:same], last.prints[:same], last.digests[: same + 1])
        for message in messages[same:]:
            printed = fingerprint_of(message)
            read.messages.append(message)
            read.prints.append(printed)
            read.digests.append(digest(read.digests[-1], printed.digest(keep_thinking=keep_thinking)))
        self._last = read
        return read

    def _fork(
        self, digests: Sequence[bytes], prints: Sequence[MessageFingerprint], node: _Node | None
    ) -> tuple[ForkReason | None, int | None]:
        """Why a request that continues `node` does not continue the newest turn before it, and the number of its first
        message that differs."""
        if not self._nodes or (node is not None and not node.children):
            return None, None
        if digests[0] not in self._known:
            return "tools_changed", 0
        at = next((at for at in range(len(prints)) if digests[at + 1] not in self._seen), len(prints))
        if at == len(prints):  # the same messages with other options, or fewer of them
            return ("branch" if digests[at] in self._asked else "messages_dropped"), at
        given, known = prints[at], self._known.get(digests[at], [])
        if given.role == "assistant":
            return _answer_changed(given, known), at
        if any(each.role == "assistant" for each in prints[at:]):  # what the client had already is written anew
            return self._rewritten(digests, prints, at), at
        if node is not None and at == node.messages:
            return ("tool_result_changed" if given.role == "tool" else "branch"), at
        return self._rewritten(digests, prints, at), at

    def _rewritten(self, digests: Sequence[bytes], prints: Sequence[MessageFingerprint], at: int) -> ForkReason:
        """How the message `at` of a request, which is not the model's, differs from those in its place."""
        given, known = prints[at], self._known.get(digests[at], [])
        inserted = any(each in prints[at + 1 :] for each in known)
        replaces = at == 0 or any(each.role == "system" for each in known)
        if given.role == "system" and replaces and not inserted:  # however short: another agent may begin here
            return "system_changed"
        newest = next(reversed(self._nodes.values()))
        if len(prints) < newest.messages - 1:
            return "messages_dropped"
        if any(each.role == given.role for each in known):
            return _CHANGED.get(given.role, "user_changed")
        return "messages_inserted" if inserted else "messages_dropped"


def _answer_changed(given: MessageFingerprint, known: Sequence[MessageFingerprint]) -> ForkReason:
    """How an answer that a client sends differs from those that the model gave."""
    answers = [each for each in known if each.role == "assistant"]
    if any((each.text, each.arguments) == (given.text, given.arguments) for each in answers):
        return "thinking_changed"
    if any((each.text, each.calls) == (given.text, given.calls) for each in answers):
        return "tool_call_changed"
    return "answer_changed" if answers else "messages_inserted"


def _is_cut(turn: AgentTurn) -> bool:
    return turn.finish_reason == "length"
