"""One request and one answer of a rollout, and how they look in SGLang's `/generate`.

SGLang and the sidecar of vLLM speak this format alike. An answer in which tokens, logprobs or the finish reason are
missing or disagree is an error: nothing is filled in. Knows neither HTTP nor retries.

A sample may come in several parts, and an engine looks for stop strings in each part alone. A part that ends with the
beginning of a stop string is continued by one token at a time, until the string is complete or cannot be any more. So
the sample ends with the token that completes the string, as an uninterrupted one does.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from skyrl.rollout.errors import BadAnswer

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "stop_token": "stop",  # some servers, where a token ended the sample
    "length": "length",
    "abort": "abort",
}
OWN_FIELDS = ("text", "input_ids", "sampling_params", "return_logprob", "return_routed_experts", "lora_path", "stream")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """SGLang's names and defaults. `extra` holds parameters that have no field here; they are sent as they are."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.max_new_tokens
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"max_new_tokens: must be an integer of at least 0, got {count!r}")
        if wrong := self.extra.keys() & ({one.name for one in fields(self)} | {"n"}):
            raise ValueError(f"{min(wrong)}: not allowed in extra")

    def to_json(self) -> dict[str, Any]:
        """All parameters, so that no default of a model or of a server decides."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "extra"}
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("stop", "stop_token_ids"):
            if name in given and not isinstance(given[name], str):
                given[name] = list(given[name])
        return {**given, **self.extra}


def new_session_id() -> str:
    """For one trajectory."""
    return str(uuid.uuid4())


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Exactly one of `text` and `input_ids` is the prompt. `session_id` keeps the requests of one trajectory at one
    worker; None: each sample has a new one, also each of a group. `lora_path` is the name of a loaded adapter. `extra`
    holds further fields of the body. Raises ValueError."""

    text: str | None = None
    input_ids: Sequence[int] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    session_id: str | None = None
    return_routed_experts: bool = False
    lora_path: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text, input_ids: exactly one of them must be given")
        if self.text == "" or (self.input_ids is not None and len(self.input_ids) == 0):
            raise ValueError("text, input_ids: the prompt must not be empty")
        if wrong := self.extra.keys() & set(OWN_FIELDS):
            raise ValueError(f"{min(wrong)}: not allowed in extra")
        if self.session_id is not None and any(character in "\r\n\0" for character in self.session_id):
            raise ValueError(f"session_id: must not have a line's end, got {self.session_id!r}")

    def to_json(self) -> dict[str, Any]:
        prompt = {"text": self.text} if self.input_ids is None else {"input_ids": list(self.input_ids)}
        body = {**prompt, "sampling_params": self.params.to_json(), "return_logprob": True, **self.extra}
        if self.return_routed_experts:
            body["return_routed_experts"] = True
        if self.lora_path is not None:
            body["lora_path"] = self.lora_path
        return body

    def continued(self, answer: RolloutAnswer, seed: int | None, *, one_token: bool = False) -> RolloutRequest:
        """The request for what is left after the tokens of `answer`, or for the next token of it. Only for a prompt of
        tokens."""
        assert self.input_ids is not None
        params, done = self.params, len(answer.tokens)
        most = 1 if one_token else params.max_new_tokens - done
        left = replace(
            params,
            max_new_tokens=most,
            min_new_tokens=min(most, max(0, params.min_new_tokens - done)),
            sampling_seed=seed,
        )
        return replace(self, input_ids=[*self.input_ids, *answer.tokens], params=left)


@dataclass(frozen=True, kw_only=True)
class RolloutAnswer:
    """One sample. `tokens`, `logprobs` and `weight_versions` are parallel and cover all parts of a sample that was
    aborted and continued. `weight_version` is the last part's. `cached_tokens` is the first part's. `routed_experts`
    is the server's text, unread, of the last part that has it; a part that was aborted may have none.
    `skyrl.rollout.routed_experts` reads those of all parts. `parts` are the server's answers. `stop_began_before`: so
    many characters at the end of the `begun` text belong to the stop string that ended this sample, and are not text
    of the sample."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    finish_reason: FinishReason = "abort"
    weight_version: str | None = None
    weight_versions: tuple[str | None, ...] = ()
    cached_tokens: int | None = None
    routed_experts: Any = None
    parts: tuple[Mapping[str, Any], ...] = ()
    stop_began_before: int = 0

    def joined(self, later: RolloutAnswer) -> RolloutAnswer:
        """This answer, and the one to the request that continued it."""
        return replace(
            later,
            tokens=self.tokens + later.tokens,
            logprobs=self.logprobs + later.logprobs,
            text=self.text + later.text,
            weight_versions=self.weight_versions + later.weight_versions,
            cached_tokens=self.cached_tokens,
            routed_experts=self.routed_experts if later.routed_experts is None else later.routed_experts,
            parts=self.parts + later.parts,
        )

    @property
    def matched_text(self) -> str:
        """The stop string that ended the last part, as its server says; empty if none did."""
        finish = self.parts[-1]["meta_info"]["finish_reason"] if self.parts else {}
        matched = finish.get("matched")
        return matched if isinstance(matched, str) and self.finish_reason == "stop" else ""


NOTHING = RolloutAnswer()
"""The answer to a request that was aborted here before a worker answered."""


def read_answer(request: RolloutRequest, body: Any) -> RolloutAnswer:
    """The answer to `request`, which asks for one sample. Raises BadAnswer, with the name of the wrong field."""
    if not isinstance(body, dict) or not isinstance(meta := body.get("meta_info"), dict):
        raise BadAnswer("meta_info: the answer has none")
    text, tokens = body.get("text"), body.get("output_ids")
    if not isinstance(text, str):
        raise BadAnswer("text: must be a string")
    if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
        raise BadAnswer("output_ids: must be a list of token ids")
    if len(tokens) > request.params.max_new_tokens:
        raise BadAnswer(f"output_ids: {len(tokens)} tokens, {request.params.max_new_tokens} were asked for")
    count = meta.get("completion_tokens")
    if count is not None and count != len(tokens):
        raise BadAnswer(f"completion_tokens: {count!r}, but output_ids has {len(tokens)}")
    version, cached = meta.get("weight_version"), meta.get("cached_tokens")
    if type(version) is int:  # of a server that counts its updates
        version = str(version)
    if not isinstance(version, str | None):
        raise BadAnswer(f"weight_version: must be a string, got {version!r}")
    if cached is not None and type(cached) is not int:
        raise BadAnswer(f"cached_tokens: must be an integer, got {cached!r}")
    experts = meta.get("routed_experts")
    finish = _finish_reason(meta)
    if request.return_routed_experts and tokens and experts is None and finish != "abort":
        raise BadAnswer("routed_experts: asked for, and missing")
    return RolloutAnswer(
        tokens=tuple(tokens),
        logprobs=_logprobs(meta, tokens),
        text=text,
        finish_reason=finish,
        weight_version=version,
        weight_versions=(version,) * len(tokens),
        cached_tokens=cached,
        routed_experts=experts,
        parts=(body,),
    )


def _finish_reason(meta: dict[str, Any]) -> FinishReason:
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else None
    if isinstance(kind, str) and kind in FINISH_REASONS:
        return FINISH_REASONS[kind]
    raise BadAnswer(f"finish_reason: must have a type of stop, length, abort, got {finish!r}")


def _logprobs(meta: dict[str, Any], tokens: list[int]) -> tuple[float, ...]:
    """A server that aborts a waiting request may leave out the list; then there are no tokens, either."""
    entries = meta.get("output_token_logprobs")
    if entries is None and not tokens:
        return ()
    if not isinstance(entries, list):
        raise BadAnswer("output_token_logprobs: missing")
    if len(entries) != len(tokens):
        raise BadAnswer(f"output_token_logprobs: {len(entries)} entries for {len(tokens)} tokens")
    logprobs = []
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2:
            raise BadAnswer(f"output_token_logprobs[{place}]: must be [logprob, token id, ...]")
        if type(entry[1]) is not int or entry[1] != token:
            raise BadAnswer(f"output_token_logprobs[{place}]: is for token {entry[1]!r}, output_ids has {token}")
        if type(entry[0]) not in (int, float) or not math.isfinite(entry[0]):
            raise BadAnswer(f"output_token_logprobs[{place}]: the logprob is {entry[0]!r}")
        logprobs.append(float(entry[0]))
    return tuple(logprobs)


def stops_of(params: SamplingParams) -> tuple[str, ...]:
    """The stop strings, in the order in which engines look for them."""
    return (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())


def may_have_begun(text: str, stops: Sequence[str]) -> bool:
    """Whether `text` ends with the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def cut_at_stop(text: str, seen: int, params: SamplingParams) -> str | None:
    """`text` as an engine gives it that finds a stop string: without the string, or up to its end with `no_stop_trim`.
    None if no stop string ends behind the first `seen` characters."""
    for stop in stops_of(params):
        start = text.find(stop, max(0, seen - len(stop) + 1))
        if start >= 0:
            return text[: start + len(stop)] if params.no_stop_trim else text[:start]
    return None
