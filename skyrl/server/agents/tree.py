"""The tree of a session's turns: where a request belongs, and which tokens came before it.

Tokens are the truth, and messages are the index to them. A turn is found by the digest of its messages and its answer;
a request continues the longest turn that its own messages begin with. Knows no template and no database.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import AgentTurn, ForkReason
from skyrl.server.agents.canonical import Print, digest, identical, print_of, setting_digest

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
    prints: list[Print]
    digests: list[bytes]


class Tree:
    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        """By id, in the order in which they ended."""
        self._by_end: dict[bytes, _Node] = {}
        """The newest turn of each end."""
        self._by_key: dict[bytes, list[AgentTurn]] = {}
        self._known: dict[bytes, list[Print]] = {}
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
            printed = print_of(message)
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
            printed = print_of(message)
            read.messages.append(message)
            read.prints.append(printed)
            read.digests.append(digest(read.digests[-1], printed.digest(keep_thinking=keep_thinking)))
        self._last = read
        return read

    def _fork(
        self, digests: Sequence[bytes], prints: Sequence[Print], node: _Node | None
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

    def _rewritten(self, digests: Sequence[bytes], prints: Sequence[Print], at: int) -> ForkReason:
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


def _answer_changed(given: Print, known: Sequence[Print]) -> ForkReason:
    """How an answer that a client sends differs from those that the model gave."""
    answers = [each for each in known if each.role == "assistant"]
    if any((each.text, each.arguments) == (given.text, given.arguments) for each in answers):
        return "thinking_changed"
    if any((each.text, each.calls) == (given.text, given.calls) for each in answers):
        return "tool_call_changed"
    return "answer_changed" if answers else "messages_inserted"


def _is_cut(turn: AgentTurn) -> bool:
    return turn.finish_reason == "length"
