"""Plays a scripted session on a template, and compares each turn's tokens with a rendering of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from skyrl.base.tiny import model_path
from skyrl.chat.agents.rendering.continuation import ContinuationTokenizer, Continued, Kept, Step
from skyrl.chat.agents.rendering.loaded_models import FileTokens, Habits, habits_of
from skyrl.chat.agents.rendering.renderer import CannotRender, ChatTemplate, Renderer, Setting, tools_of
from skyrl.chat.openai import messages as chat_messages
from tests.released_sessions import by_vllm
from tests.released_sessions.scripts import TOOLS, Script, scripts

ENDS = (
    *("<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|END_OF_TURN_TOKEN|>"),
    *("[e~[", "<|assistant_end|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<seed:eos>", "<|user_end|>"),
    *("<|observation|>", "<|user|>", "<|call|>", "<|calls|>", "<eos>", "<|role_end|>", "</assistant>", "<|eot|>"),
    *("<end_of_sentence>", "<|end_of_msg|>", "<｜hy_eos:opensource｜>", "<|tool_response>", "<|eom_id|>"),
    *("<|content_model_end_sampling|>", "<|tools_suffix|>", "<|endoftext|>", "<|message_sep|>"),
)
"""Tokens that end an answer of one model or another."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
AT = 1_790_000_000.0

Outcome = Literal["exact", "same text", "other form of the answer", "forks", "forks needlessly", "refused", "wrong"]


@dataclass(frozen=True)
class Turn:
    """`note` is that of the fork."""

    script: Script
    number: int
    outcome: Outcome
    note: str = ""


class Model:
    """A template, or vLLM's own code for a kind of models, with the tiny model's tokenizer and the tokens that end
    answers."""

    def __init__(self, renderer: Renderer, *, thinks: bool, stops: Sequence[str] = (), by_vllm: bool = True) -> None:
        tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
        tokenizer.add_special_tokens([*ENDS])
        self.tokens = FileTokens(tokenizer)
        self.renderer = renderer
        self._by_vllm = by_vllm and isinstance(renderer, ChatTemplate)
        found = stops or _stops(renderer)
        self.stops = {end: token for end in found if (token := self.tokens.id_of(end)) is not None}
        self.continuations = ContinuationTokenizer(renderer, self.tokens, self.stops)
        self.habits: Habits = habits_of(self.continuations, thinks=thinks)
        self.scripts = scripts(thinks and not self._closes())

    def play(self, keep: bool = False) -> list[Turn]:
        return [turn for script in self.scripts for turn in self._played(script, keep)]

    def whole(self, messages: Sequence[dict[str, Any]], tools: bool, begins: bool = True) -> str:
        """By vLLM's and transformers' own code where that can be. Raises by_vllm.Refused."""
        placed = chat_messages.for_template(messages)
        if not self.renderer.has_system_role:
            placed = chat_messages.without_the_role(placed)
        if self._by_vllm and isinstance(self.renderer, ChatTemplate):
            given = TOOLS if tools else None
            text = self.renderer.text_for(tools=tools)
            return by_vllm.render(text, SPECIAL, placed, given, self.habits.switches, begins=begins)
        try:
            return self.renderer.render(placed, self._setting(tools))
        except CannotRender as error:
            raise by_vllm.Refused(str(error)) from error

    def _setting(self, tools: bool) -> Setting:
        return Setting(self.habits.switches, tools_of(TOOLS) if tools else None, AT)

    def _closes(self) -> bool:
        """The template begins answers behind a thought, or there are none."""
        try:
            text = self.renderer.render([{"role": "user", "content": "Go."}], Setting(self.habits.switches))
        except CannotRender:
            return False
        return text.rstrip().endswith(("</think>", "</think:opensource>", "<channel|>", "[/THINK]"))

    def _played(self, script: Script, keep: bool) -> list[Turn]:
        messages: list[dict[str, Any]] = []
        played: list[Turn] = []
        kept, tokens, added, text = Kept(), list[int](), list[int](), ""
        for number, (new, answer) in enumerate(script.turns):
            before = messages
            messages = [*messages, *new]
            try:
                whole = self.whole(messages, script.tools)
            except by_vllm.Refused as error:
                return [*played, Turn(script, number, "refused", str(error)[:100])]
            if not before:
                text, tokens = whole, self.tokens.encode(whole)
                added = tokens
            else:
                answered = self._answer(before[:-1], before[-1], script.tools)
                if answered is None:
                    return [*played, Turn(script, number, "refused", "the model's answer ends before that")]
                said, sampled = answered
                step = self._step(script, before, new, added, sampled, number, keep)
                done = self.continuations.continued(step, kept)
                began = text + said
                if isinstance(done, Continued):
                    tokens, added = [*tokens, *sampled, *done.ids], done.ids
                    text = began + self.tokens.decode(done.ids)
                    outcome = self._outcome(done, tokens, text, whole, began)
                    played.append(Turn(script, number, outcome, done.note or ""))
                else:
                    needless = whole.startswith(began) and not _drops(done.note)
                    played.append(Turn(script, number, "forks needlessly" if needless else "forks", done.note))
                    text, tokens = whole, self.tokens.encode(whole)
                    added = tokens
            messages = [*messages, answer]
        return played

    def _outcome(self, done: Continued, tokens: list[int], text: str, whole: str, began: str) -> Outcome:
        if tokens == self.tokens.encode(whole):
            return "exact"
        if text == whole:
            return "same text"
        if done.note is not None:
            return "other form of the answer"
        tail = self.tokens.decode(done.ids)
        return "other form of the answer" if whole.endswith(tail) and not whole.startswith(began) else "wrong"

    def _answer(
        self, before: Sequence[dict[str, Any]], answer: dict[str, Any], tools: bool
    ) -> tuple[str, list[int]] | None:
        """The answer as the model would have sampled it: as the template writes it, up to the token that ends it. None
        if that token comes before its end: gpt-oss cannot call two tools at once."""
        follower = (
            {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "x"}
            if answer.get("tool_calls")
            else {"role": "user", "content": "x"}
        )
        for messages, begins in (([*before, answer], False), ([*before, answer, follower], True)):
            try:
                text = self.whole(messages, tools, begins)
            except by_vllm.Refused:
                continue
            own = self.whole(before, tools)
            if not text.startswith(own):
                continue
            rest = text[len(own) :]
            ends = [at + len(end) for end in self.stops if (at := rest.find(end)) >= 0]
            if ends and all(part in rest for part in _parts(answer)):
                said = rest[: min(ends)]
                return (said, self.tokens.encode(said)) if all(part in said for part in _parts(answer)) else None
        end = next(iter(self.stops))
        said = " ".join(_parts(answer)) + end
        return said, self.tokens.encode(said)

    def _step(
        self,
        script: Script,
        before: Sequence[dict[str, Any]],
        new: Sequence[dict[str, Any]],
        added: Sequence[int],
        sampled: Sequence[int],
        number: int,
        keep: bool,
    ) -> Step:
        return Step(
            id=f"t{number - 1}",
            next_id=f"t{number}",
            before=before[:-1],
            said=[True] * (number - 1),
            answer=before[-1],
            new=new,
            prompt=np.array(added, np.int32),
            sampled=np.array(sampled, np.int32),
            setting=self._setting(script.tools),
            keep=keep,
        )


def _parts(answer: Mapping[str, Any]) -> list[str]:
    calls = [call["function"]["name"] for call in answer.get("tool_calls") or ()]
    return [part for part in (answer.get("reasoning"), answer["content"], *calls) if part]


def _drops(note: str) -> bool:
    return "leaves out" in note or "it ended with" in note


def _stops(renderer: Renderer) -> list[str]:
    """Those of the tokens that end answers with which this template does."""
    found: list[str] = []
    for script in scripts(thinks=False):
        (first, answer), (second, _), *_ = script.turns
        try:
            text = renderer.render(
                chat_messages.for_template([*first, answer, *second]),
                Setting(tools=tools_of(TOOLS) if script.tools else None),
            )
        except CannotRender:
            continue
        last = "pier 0" if answer.get("tool_calls") else answer["content"]
        rest = text[text.rfind(last) :]
        ends = [(at, -len(end), end) for end in ENDS if (at := rest.find(end)) >= 0]
        if ends and (end := min(ends)[2]) not in found:
            found.append(end)
    return found or [ENDS[0]]
