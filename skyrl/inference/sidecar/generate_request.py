"""The body of SGLang's `/generate` as prompts and what is wanted for each. Knows neither vLLM nor answers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.fields import boolean, integer, mapping, string, token_ids
from skyrl.inference.sidecar.pictures import FIELD as PICTURES
from skyrl.inference.sidecar.pictures import read_pictures
from skyrl.inference.sidecar.sampling_params import Sampling, read_sampling

REFUSED = (
    "input_embeds",
    "video_data",
    "audio_data",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_indexer_topk",
    "return_entropy",
    "bootstrap_host",
    "bootstrap_room",
    "positional_embed_overrides",
)
"""Fields without an equivalent in vLLM. null, false and empty lists are accepted: clients send them with every
request. Fields that are not known are ignored, as SGLang does."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Which logprobs one prompt wants. `start` is the first prompt token (-1: none of the prompt)."""

    start: int = -1
    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`rid` is the request id, `id` the name of a prompt with one sample. `extra` holds further fields for vLLM.
    `logprobs` is None if none are wanted. `pictures` are as they were sent."""

    rid: str
    tokens: list[int] | str
    sampling: Sampling
    logprobs: Logprobs | None
    adapter: str | None
    extra: dict[str, Any]
    pictures: tuple[str, ...] = ()

    def sample_ids(self) -> list[str]:
        """A name for each sample. The samples of one prompt get new names, as SGLang names them."""
        return [self.rid] if self.sampling.n == 1 else [uuid.uuid4().hex for _ in range(self.sampling.n)]

    def with_tokens(self, tokens: list[int]) -> Prompt:
        return replace(self, tokens=tokens)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`single`: the answer is one object, not a list. `routed_experts_start` is None if they are not wanted."""

    prompts: list[Prompt]
    single: bool
    stream: bool
    text_in_logprobs: bool
    return_prompt_tokens: bool
    routed_experts_start: int | None

    @property
    def samples(self) -> int:
        return sum(prompt.sampling.n for prompt in self.prompts)


def read_generate(body: bytes) -> GenerateRequest:
    """Raises BadRequest, with the name of the wrong field."""
    try:
        given = mapping("body", msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: is not JSON: {error}") from error
    given = {key: value for key, value in given.items() if value is not None}
    for name in REFUSED:
        if given.get(name) not in (None, False, [], {}, ""):
            raise BadRequest(f"{name}: is not supported by this server")
    tokens, batched = _prompts(given)
    count = len(tokens)
    flag = {
        name: boolean(name, given.get(name, False))
        for name in ("stream", "return_text_in_logprobs", "return_prompt_token_ids", "return_routed_experts")
    }
    samplings = _samplings(given, count, batched)
    wanted = _per_prompt(given, "return_logprob", count, batched, boolean, False)
    logprobs = _logprobs(given, count, batched)
    adapters = _per_prompt(given, "lora_path", count, batched, string, None)
    pictures = read_pictures(given.get(PICTURES), count, batched)
    each = zip(pictures, wanted, logprobs, strict=True)
    _check_beside_pictures(one for shown, asked, one in each if shown and asked)
    rids = _rids(given.get("rid"), count, batched)
    extra = _extra(given)
    start = integer("routed_experts_start_len", given.get("routed_experts_start_len", 0), 0)
    if flag["return_routed_experts"]:
        extra["routed_experts_prompt_start"] = start
    prompts = [
        Prompt(
            rids[i],
            tokens[i],
            samplings[i],
            logprobs[i] if wanted[i] else None,
            adapters[i] or None,
            extra,
            pictures[i],
        )
        for i in range(count)
    ]
    return GenerateRequest(
        prompts,
        single=not batched and samplings[0].n == 1,
        stream=flag["stream"],
        text_in_logprobs=flag["return_text_in_logprobs"],
        return_prompt_tokens=flag["return_prompt_token_ids"],
        routed_experts_start=start if flag["return_routed_experts"] else None,
    )


def _prompts(given: dict[str, Any]) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a batch. `text` wins over `input_ids`, as in SGLang."""
    if (text := given.get("text")) is not None:
        if isinstance(text, list) and text:
            return [_text(one) for one in text], True
        return [_text(text)], False
    ids = given.get("input_ids")
    if ids is None:
        raise BadRequest("text, input_ids: one of them must be given")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return [token_ids("input_ids", one) for one in ids], True
    return [token_ids("input_ids", ids)], False


def _text(given: Any) -> str:
    if not string("text", given):
        raise BadRequest("text: must not be empty")
    return given


def _samplings(given: dict[str, Any], count: int, batched: bool) -> list[Sampling]:
    params = given.get("sampling_params")
    if not isinstance(params, list):
        return [read_sampling(params)] * count
    if not batched:
        raise BadRequest("sampling_params: a list needs a list of prompts")
    if len(params) != count:
        raise BadRequest(f"sampling_params: has {len(params)} elements for {count} prompts")
    read = [read_sampling(one, f"sampling_params[{i}]") for i, one in enumerate(params)]
    if len({sampling.n for sampling in read}) > 1:
        raise BadRequest("sampling_params: n must be the same for all prompts of a batch")
    return read


def _logprobs(given: dict[str, Any], count: int, batched: bool) -> list[Logprobs]:
    starts = _per_prompt(given, "logprob_start_len", count, batched, lambda name, value: integer(name, value, -1), -1)
    tops = _per_prompt(given, "top_logprobs_num", count, batched, lambda name, value: integer(name, value, 0), 0)
    ids = given.get("token_ids_logprob")
    if isinstance(ids, list) and any(isinstance(one, list) or one is None for one in ids):
        if not batched or len(ids) != count:
            raise BadRequest(f"token_ids_logprob: has {len(ids)} lists for {count} prompts")
        each = [() if not one else tuple(token_ids("token_ids_logprob", one)) for one in ids]
    else:
        each = [() if not ids else tuple(token_ids("token_ids_logprob", ids))] * count
    for top, named in zip(tops, each, strict=True):
        if top and named:
            raise BadRequest("token_ids_logprob: cannot be combined with top_logprobs_num")
    for start, named in zip(starts, each, strict=True):
        if start >= 0 and named:
            raise BadRequest("token_ids_logprob: cannot be combined with logprob_start_len: vLLM has no such logprobs")
    return [Logprobs(*one) for one in zip(starts, tops, each, strict=True)]


def _check_beside_pictures(wanted: Iterable[Logprobs]) -> None:
    """vLLM names the most likely tokens beside pictures by their texts, which several tokens may have."""
    for one in wanted:
        for name, value in (("top_logprobs_num", one.top), ("token_ids_logprob", one.ids)):
            if value:
                raise BadRequest(f"{name}: cannot be combined with {PICTURES}")


def _per_prompt(
    given: dict[str, Any], name: str, count: int, batched: bool, read: Callable[[str, Any], Any], default: Any
) -> list[Any]:
    """One value for each prompt. A single value is for all prompts; null in a list is the default."""
    value = given.get(name, default)
    if not isinstance(value, list):
        return [default if value is default else read(name, value)] * count
    if not batched:
        raise BadRequest(f"{name}: a list needs a list of prompts")
    if len(value) != count:
        raise BadRequest(f"{name}: has {len(value)} elements for {count} prompts")
    return [default if one is None else read(name, one) for one in value]


def _rids(given: Any, count: int, batched: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if not isinstance(given, list):
        rid = string("rid", given)
        return [f"{rid}_{i}" for i in range(count)] if batched else [rid]
    if not batched or len(given) != count:
        raise BadRequest(f"rid: has {len(given)} elements for {count} prompts")
    rids = [string("rid", one) for one in given]
    if len(set(rids)) < count:
        raise BadRequest("rid: the elements of a list must differ")
    return rids


def _extra(given: dict[str, Any]) -> dict[str, Any]:
    """Fields that vLLM has, too. In vLLM a low priority is served first, in SGLang a high one."""
    extra: dict[str, Any] = {}
    if "session_id" in given:
        extra["session_id"] = string("session_id", given["session_id"])
    for name in ("cache_salt", "extra_key"):
        if given.get(name):
            extra.setdefault("cache_salt", string(name, given[name]))
    if given.get("priority"):
        extra["priority"] = -integer("priority", given["priority"], -(2**62), 2**62)
    return extra
