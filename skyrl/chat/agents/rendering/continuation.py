"""The tokens that go between a turn's answer and the next one: what a rendering of the whole conversation adds.

The session's own conversation is rendered twice, with its system prompt, tools and history: as it was when the turn
was asked for, and with its answer and what came after it. The tail is what the second adds behind the answer. It counts
only if the second begins with the first, has all parts of the answer, and ends it with the token that was sampled last;
then the tokens are those of a rendering of the whole, but for the answers, which stay as they were sampled. Answers are
masked, so only what a renderer writes around them is compared. Only the tail is tokenised.

A rendering takes time for each message. So a long conversation is rendered whole when it has grown by a half, and when
something comes that it has not had, such as the user's second message; in between, its beginning and its newest
messages stand for it, if both gave the same tail when the whole was rendered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skyrl.base.types.agents import ForkReason
from skyrl.chat.agents.rendering.masks import (
    MASK,
    TAGS,
    AnswerPart,
    Kind,
    Masked,
    excerpt,
    masked,
    shown,
    word,
)
from skyrl.chat.agents.rendering.renderer import CannotRender, Renderer, Setting
from skyrl.chat.agents.tree import functions_of, text_of
from skyrl.chat.openai.messages import for_template, without_the_role

MAX_CHECKED = 1000
MAX_KEPT = 8
"""Renderings of a session that are remembered, by their digests: those of its newest turns."""
NOTE_CHARACTERS = 300
SHORT, NEWEST, GROWTH = 24, 6, 1.5
"""Of a conversation's messages: so many are always rendered; so many stand for a longer one, with its beginning; and by
how much it grows until it is rendered whole again."""
MAX_STEPS = 16
"""Kinds of steps that a session remembers."""
_EXCERPT = 40
_END_TOKENS, _END_CHARACTERS = 8, 400
"""Of a prompt, compared with its rendering."""
_NAMES: dict[Kind, str] = {"thinking": "thinking", "text": "text", "call": "tool call"}


StepKind = tuple[tuple[str, ...], int, bool, bool, tuple[str, ...], int | None]


class TextTokens(Protocol):
    """A tokenizer, as far as tails need it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text with special tokens in it; none are added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """A turn that is to be continued. `before` are all messages of its request, `said` tells of each answer in them
    whether it was sampled, `prompt` are the last ids of its prompt, `sampled` those of its `answer`, `new` the messages
    behind it. `joined` is the number of a message whose tokens go on with those of the answer before it. With `keep`
    the tokens go on also where the renderer drops earlier thoughts. `id` is that of the turn, `next_id` that of the one
    that will continue it."""

    id: str
    next_id: str
    before: Sequence[dict[str, Any]]
    said: Sequence[bool]
    answer: dict[str, Any]
    new: Sequence[dict[str, Any]]
    prompt: NDArray[np.int32]
    sampled: NDArray[np.int32]
    setting: Setting
    keep: bool
    joined: int | None = None

    @property
    def whole(self) -> list[dict[str, Any]]:
        return [*self.before, self.answer, *self.new]

    @property
    def kind(self) -> StepKind:
        """What decides how a renderer continues: two steps of one session with the same kind are alike to it."""
        answer, calls = self.answer, len(functions_of(self.answer))
        thought = bool(answer.get("reasoning") or answer.get("reasoning_content"))
        said = text_of(answer.get("content")).strip()
        last = int(self.sampled[-1]) if len(self.sampled) else None
        roles = tuple(message["role"] for message in self.new)
        return roles, calls, thought, bool(said), tuple(TAGS.findall(said)), last

    def shortened(self) -> Step:
        """The same step after the conversation's beginning and its newest messages alone."""
        answers = [at for at, message in enumerate(self.before) if message["role"] == "assistant"]
        if not answers:
            return self
        newest = len(self.before) - NEWEST
        kept = next((number for number, at in enumerate(answers) if at >= newest), len(answers) - 1)
        before = [*self.before[: answers[0]], *self.before[answers[kept] :]]
        return replace(self, before=before, said=self.said[kept:])


@dataclass(frozen=True, slots=True)
class Continued:
    """`ids` follow the sampled ones. `note` says how the renderer would have written the conversation otherwise; None
    if the tokens are those of its rendering."""

    ids: list[int]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """There are no such tokens. `message` is the number of the message that is written otherwise, where known."""

    reason: ForkReason
    note: str
    message: int | None = None


@dataclass(frozen=True, slots=True)
class _Printed:
    """What is remembered of a rendering: its length, its digest, and its last characters."""

    length: int
    digest: bytes
    end: str

    @classmethod
    def of(cls, text: str) -> _Printed:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        return cls(len(text), digest, text[-_END_CHARACTERS:])

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and _Printed.of(text[: self.length]).digest == self.digest


@dataclass(frozen=True, slots=True)
class _Whole:
    """A step of `messages` messages that was rendered whole, with this `note`, and shortened to the same end."""

    messages: int
    note: str | None


@dataclass(slots=True)
class Kept:
    """What a session remembers: the renderings that its next turns begin with, by the id of the turn whose prompt each
    is; and for each kind of step the newest one that was rendered whole."""

    renderings: OrderedDict[tuple[str, bool], _Printed] = field(default_factory=OrderedDict)
    steps: OrderedDict[StepKind, _Whole] = field(default_factory=OrderedDict)

    def stands(self, step: Step) -> _Whole | None:
        """The step by which this one can be told without rendering the whole."""
        known = self.steps.get(step.kind)
        return known if known is not None and len(step.before) <= GROWTH * known.messages else None

    def put_step(self, step: Step, note: str | None) -> None:
        self.steps[step.kind] = _Whole(len(step.before), note)
        while len(self.steps) > MAX_STEPS:
            self.steps.popitem(last=False)

    def put(self, turn_id: str, thinking: bool, text: str) -> None:
        self.renderings[turn_id, thinking] = _Printed.of(text)
        while len(self.renderings) > MAX_KEPT:
            self.renderings.popitem(last=False)

    def get(self, turn_id: str, thinking: bool) -> _Printed | None:
        return self.renderings.get((turn_id.partition(".")[0], thinking))


class _Differs(Exception):
    """The renderer writes the conversation otherwise than the tokens have it."""

    def __init__(self, note: str, message: int | None = None) -> None:
        super().__init__(note)
        self.message = message


class ContinuationTokenizer:
    """Of one model. `stops` are the ids of the tokens that end an answer, by their texts."""

    def __init__(self, renderer: Renderer, tokens: TextTokens, stops: dict[str, int]) -> None:
        self.renderer = renderer
        self._tokens = tokens
        self.stops = stops
        self._checked: set[tuple[Any, ...]] = set()

    def continued(self, step: Step, kept: Kept | None = None) -> Continued | Fork:
        """The tokens that follow a turn's, or why there are none. `kept` is the session's, and is added to."""
        kept = Kept() if kept is None else kept
        if len(step.before) <= SHORT or step.joined is not None:
            return self._whole(step, kept)
        if (known := kept.stands(step)) is not None:
            done = self._whole(step.shortened(), Kept())
            if isinstance(done, Continued) and (done.note is None) == (known.note is None):
                return replace(done, note=known.note)
        done = self._whole(step, kept)
        if isinstance(done, Continued):
            short = self._whole(step.shortened(), Kept())
            if isinstance(short, Continued) and short.ids == done.ids:
                kept.put_step(step, done.note)
        return done

    def _whole(self, step: Step, kept: Kept) -> Continued | Fork:
        try:
            try:
                return self._continued(step, kept, thinking=True)
            except _Differs as differs:
                if not step.keep:
                    return Fork("template_rewrites", _cut(str(differs)), differs.message)
                ids = self._continued(step, kept, thinking=False).ids
                return Continued(ids, _cut(str(differs)))
        except CannotRender as error:
            return Fork("not_extendable", _cut(str(error)))
        except _Differs as differs:
            return Fork("template_rewrites", _cut(str(differs)), differs.message)

    def _continued(self, step: Step, kept: Kept, *, thinking: bool) -> Continued:
        """Without `thinking` the conversation is compared without its thoughts, up to where the earlier prompt begins
        its answer: there a renderer may begin a thought. Raises CannotRender, _Differs."""
        chat = self._masked(step, thinking)
        text = self.renderer.render(chat.messages, step.setting)
        kept.put(step.next_id, thinking, text)
        old = kept.get(step.id, thinking)
        earlier = None if old is not None else self._earlier(step, thinking)
        old = old or _Printed.of(earlier or "")
        if thinking and step.joined is not None:
            raise _Differs(f"message {step.joined}: it goes on with the answer before it, in one turn", step.joined)
        if thinking:
            self._check_prompt(old, step.prompt)
        if not old.begins(text):
            earlier = self._earlier(step, thinking) if earlier is None else earlier
            if thinking or not self._begins_but_for_the_answer(earlier, text, step):
                raise _difference(earlier, text, chat.parts, self._numbers(step))
        return self._behind(text, chat, step, exact=thinking)

    def _behind(self, text: str, chat: Masked, step: Step, *, exact: bool) -> Continued:
        """What follows the last answer in `text`. Not `exact`, the answer may have ended with another token. Raises
        CannotRender, _Differs."""
        missing = [part for part in chat.last if part.word not in text]
        if missing:
            raise _left_out(missing, self._numbers(step))
        last = max(text.rfind(part.word) + len(part.word) for part in chat.last)
        self._check_form(chat, step, last)
        found = self._end(text, last)
        if found is None:
            raise CannotRender("no token that ends an answer follows an answer")
        at, end = found
        ids = self._tokens.encode(text[at:])
        ended = len(step.sampled) > 0 and int(step.sampled[-1]) in self.stops.values()
        if not ended:
            return Continued(ids)
        if exact and self.stops.get(end) != int(step.sampled[-1]):
            sampled = next(name for name, token in self.stops.items() if token == int(step.sampled[-1]))
            number = len(step.before)
            raise _Differs(
                f"message {number}: it ended with {sampled!r}, and the template ends it with {end!r}", number
            )
        own = self._tokens.encode(end)
        if len(own) != 1 or ids[:1] != own:
            raise CannotRender(f"{end!r} is not one token")
        return Continued(ids[1:])

    def _end(self, text: str, after: int) -> tuple[int, str] | None:
        """Where the answer ends that has its last word before `after`, and the text that ends it."""
        ends = (*self.stops, *self.renderer.ends)
        found = [(at, -len(end), end) for end in ends if (at := text.find(end, after)) >= 0]
        if not found:
            return None
        at, _, end = min(found)
        return at, end

    def _check_prompt(self, old: _Printed, prompt: NDArray[np.int32]) -> None:
        """The prompt's tokens end as its rendering does: the inference server may have another template. Blanks do not
        count, since some tokenizers lose them. Raises CannotRender."""
        said = "".join(self._tokens.decode(prompt[-_END_TOKENS:].tolist()).split()).lstrip("\N{REPLACEMENT CHARACTER}")
        if not "".join(shown(old.end).split()).endswith(said):
            raise CannotRender("the inference server writes prompts otherwise than the model's files say")

    def _check_form(self, chat: Masked, step: Step, last: int) -> None:
        """The template shows the new messages, and ends the answer before them: a client could write the token that
        ends an answer into a message. Raises CannotRender."""
        new = len(chat.messages) - 1 - chat.last[0].message
        if not new:
            return
        roles = tuple(message["role"] for message in chat.messages[-new:])
        kinds = tuple(part.kind for part in chat.last)
        form = (roles, kinds, repr(step.setting.arguments), step.setting.tools is not None, chat.messages[0]["role"])
        if form in self._checked:
            return
        words = [word(len(chat.messages), number) for number in range(new)]
        named = zip(chat.messages[-new:], words, strict=True)
        messages = [*chat.messages[:-new], *(message | {"content": each} for message, each in named)]
        tried = self.renderer.render(messages, step.setting)
        places = [tried.find(each, last) for each in words]
        if min(places) < 0:
            raise CannotRender("the template leaves a message out")
        end = self._end(tried, last)
        if end is None or end[0] > min(places):
            raise CannotRender("no token that ends an answer follows an answer")
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked.add(form)

    def _begins_but_for_the_answer(self, earlier: str, text: str, step: Step) -> bool:
        """Whether two renderings differ only behind the last message of the earlier one."""
        messages = masked(self._placed(step.before), step.said, thinking=False).messages
        if not messages or messages[-1]["role"] == "assistant":
            return False
        mark = word(len(messages), 0)
        marked = self.renderer.render([*messages[:-1], messages[-1] | {"content": mark}], step.setting)
        return mark in marked and len(earlier) - _same(earlier, text) <= len(marked.rpartition(mark)[2])

    def _earlier(self, step: Step, thinking: bool) -> str:
        chat = masked(self._placed(step.before), step.said, thinking=thinking)
        return self.renderer.render(chat.messages, step.setting)

    def _masked(self, step: Step, thinking: bool) -> Masked:
        given = sum(message["role"] == "assistant" for message in step.new)
        return masked(self._placed(step.whole), [*step.said, True, *[False] * given], thinking=thinking)

    def _placed(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        placed = for_template(messages)
        return placed if self.renderer.has_system_role else without_the_role(placed)

    def _numbers(self, step: Step) -> dict[int, int]:
        """The number in a request of each answer, by its number in what the renderer gets."""
        answers = [at for at, message in enumerate(step.whole) if message["role"] == "assistant"]
        placed = [at for at, message in enumerate(self._placed(step.whole)) if message["role"] == "assistant"]
        return dict(zip(placed, answers, strict=True))


def _left_out(parts: Sequence[AnswerPart], numbers: dict[int, int]) -> _Differs:
    first = numbers[parts[0].message]
    kinds = dict.fromkeys(_NAMES[part.kind] for part in parts)
    answers = list(dict.fromkeys(numbers[part.message] for part in parts))
    where = f"message {first}" if len(answers) == 1 else f"messages {first} to {answers[-1]}"
    return _Differs(f"{where}: the template leaves out the answer's {' and '.join(kinds)}", first)


def _difference(earlier: str, text: str, parts: Sequence[AnswerPart], numbers: dict[int, int]) -> _Differs:
    """How a rendering differs from the one that it should begin with."""
    if gone := [part for part in parts if part.word in earlier and part.word not in text]:
        return _left_out(gone, numbers)
    at = _same(earlier, text)
    before = [part for part in parts if 0 <= earlier.find(part.word) < at]
    where = f"behind message {numbers[before[-1].message]}" if before else "before the first answer"
    was, now = (excerpt(each, at, _EXCERPT // 4, _EXCERPT) for each in (earlier, text))
    number = numbers[before[-1].message] + 1 if before else 0
    return _Differs(f"{where}: the template writes {now!r}, and wrote {was!r}", number)


def _same(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(note: str) -> str:
    return note if len(note) <= NOTE_CHARACTERS else note[: NOTE_CHARACTERS - 1] + MASK
