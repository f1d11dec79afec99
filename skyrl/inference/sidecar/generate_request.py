"""The body of SGLang's `/generate` as prompts and what is wanted for each. Knows neither vLLM nor answers.

`read_sampling` turns SGLang's sampling parameters into fields of vLLM's `/v1/completions`. Every parameter is sent,
also a default: otherwise the model's `generation_config.json` would decide in vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyrl.inference.sidecar.call import INT64_MAX, boolean, integer, mapping, number, string, token_ids
from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.pictures import FIELD as PICTURES
from skyrl.inference.sidecar.pictures import read_pictures

DEFAULT_NEW_TOKENS = 128
GREEDY_UP_TO = 1e-6
MAX_SAMPLES = 16_384
"""vLLM's own bound of `n`."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""How SGLang and vLLM name what an output must match."""
_NO_BEAMS = "give n and temperature for several samples"
REFUSED_PARAMETERS = {
    "stop_regex": "name the texts in stop, or the tokens in stop_token_ids; regex is what a whole answer must match",
    "beam_width": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "custom_logit_processor": "logit_bias changes the logits of single tokens",
}
"""Without these, other tokens would be sampled; vLLM has no equivalent. What a client can use in their place."""
CUSTOM = "custom_params"
"""Meant for extensions of SGLang, which ignores what it has no extension for. One of them is here, slime's."""
KEPT = "return_top_p_token_ids"
MOST_KEPT = 1024
"""The largest top_k with which the kept tokens are told."""
TIES = 15
"""vLLM keeps all tokens whose logits equal the k-th. So many more than k are asked for, to see whether these are all;
with top_k 50 that is what the vLLMs of `skyrl rollout` give."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`max_new_tokens` is None if the client left it to the default, which the context may shorten. `fields` are for
    vLLM; the number of tokens and the seed are apart because they depend on the prompt and on the sample. `kept`: fewer
    tokens than that are kept at each step, and are to be told; 0: they are not asked for, or all are kept."""

    n: int
    max_new_tokens: int | None
    seed: int | None
    fields: dict[str, Any]
    kept: int = 0

    def seed_of(self, child: int) -> int | None:
        """The seed of one of the n samples."""
        return None if self.seed is None else self.seed + child


def read_sampling(given: Any, name: str = "sampling_params") -> Sampling:
    """Raises BadRequest. A parameter that is null counts as omitted."""
    params = {} if given is None else {key: value for key, value in mapping(name, given).items() if value is not None}
    for key, instead in REFUSED_PARAMETERS.items():
        if params.pop(key, None) not in (None, False, 1, "", []):
            raise BadRequest(f"{name}.{key}: is not supported by vLLM; {instead}")
    custom = params.pop(CUSTOM, None)
    n = integer(f"{name}.n", params.pop("n", 1), 1, MAX_SAMPLES)
    new_tokens = params.pop("max_new_tokens", None)
    if new_tokens is not None:
        new_tokens = integer(f"{name}.max_new_tokens", new_tokens, 0)
    seed = params.pop("sampling_seed", None)
    if seed is not None:
        seed = integer(f"{name}.sampling_seed", seed, -(2**63), INT64_MAX - n + 1)
    fields = _fields(params, name)
    most = DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
    if fields["min_tokens"] > most:
        raise BadRequest(f"{name}.min_new_tokens: must be at most max_new_tokens ({most}), got {fields['min_tokens']}")
    if params:
        raise BadRequest(f"{name}.{next(iter(params))}: is not a sampling parameter")
    asks = isinstance(custom, dict) and boolean(f"{name}.{CUSTOM}.{KEPT}", custom.get(KEPT) or False)
    return Sampling(n, new_tokens, seed, fields, _kept(fields, f"{name}.{CUSTOM}.{KEPT}") if asks else 0)


def _kept(fields: dict[str, Any], name: str) -> int:
    """`Sampling.kept` of a request that asks for the kept tokens. Raises BadRequest."""
    top_k = fields["top_k"]
    if fields["temperature"] == 0 or (top_k == -1 and fields["top_p"] == 1 and fields["min_p"] == 0):
        return 0
    if not 1 <= top_k <= MOST_KEPT:
        raise BadRequest(
            f"{name}: needs top_k from 1 to {MOST_KEPT} beside top_p, so that the kept tokens are few; got {top_k}"
        )
    if "structured_outputs" in fields:
        raise BadRequest(f"{name}: cannot be combined with a grammar, under which logprobs are those of all tokens")
    return top_k + TIES


def _fields(params: dict[str, Any], name: str) -> dict[str, Any]:
    """vLLM's fields of `params`, from which what is read is removed."""

    def take(key: str, default: Any) -> Any:
        return params.pop(key, default)

    def flag(key: str, default: bool) -> bool:
        return boolean(f"{name}.{key}", take(key, default))

    temperature = number(f"{name}.temperature", take("temperature", 1.0), 0)
    top_k = integer(f"{name}.top_k", take("top_k", -1), -1)
    if top_k == 0:
        raise BadRequest(f"{name}.top_k: must be -1 (all tokens) or at least 1, got 0")
    fields: dict[str, Any] = {
        "temperature": 0.0 if temperature <= GREEDY_UP_TO else temperature,
        "top_p": number(f"{name}.top_p", take("top_p", 1.0), 0, 1, above=True),
        "top_k": -1 if top_k >= 2**30 else top_k,
        "min_p": number(f"{name}.min_p", take("min_p", 0.0), 0, 1),
        "frequency_penalty": number(f"{name}.frequency_penalty", take("frequency_penalty", 0.0), -2, 2),
        "presence_penalty": number(f"{name}.presence_penalty", take("presence_penalty", 0.0), -2, 2),
        "repetition_penalty": number(f"{name}.repetition_penalty", take("repetition_penalty", 1.0), 0, 2, above=True),
        "min_tokens": integer(f"{name}.min_new_tokens", take("min_new_tokens", 0), 0),
        "stop": _stops(f"{name}.stop", take("stop", [])),
        "stop_token_ids": _stop_ids(f"{name}.stop_token_ids", take("stop_token_ids", [])),
        "ignore_eos": flag("ignore_eos", False),
        "skip_special_tokens": flag("skip_special_tokens", True),
        "spaces_between_special_tokens": flag("spaces_between_special_tokens", True),
        "include_stop_str_in_output": flag("no_stop_trim", False),
    }
    if "logit_bias" in params:
        fields["logit_bias"] = _logit_bias(f"{name}.logit_bias", params.pop("logit_bias"))
    if "stream_interval" in params:
        fields["stream_interval"] = integer(f"{name}.stream_interval", params.pop("stream_interval"), 1)
    if grammar := _grammar(params, name):
        fields["structured_outputs"] = grammar
    return fields


def _stops(name: str, given: Any) -> list[str]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list):
        raise BadRequest(f"{name}: must be a string or a list of strings")
    for stop in stops:
        if not string(name, stop):
            raise BadRequest(f"{name}: a stop string must not be empty")
    return list(dict.fromkeys(stops))


def _stop_ids(name: str, given: Any) -> list[int]:
    """SGLang leaves out elements that are null."""
    if not isinstance(given, list):
        raise BadRequest(f"{name}: must be a list of token ids")
    return list(dict.fromkeys(integer(name, token, 0) for token in given if token is not None))


def _logit_bias(name: str, given: Any) -> dict[str, float]:
    for token, bias in mapping(name, given).items():
        if not (token.isascii() and token.isdigit()):
            raise BadRequest(f"{name}: {token!r} is not a token id")
        number(f"{name}.{token}", bias, -100, 100)
    return given


def _grammar(params: dict[str, Any], name: str) -> dict[str, Any] | None:
    given = [key for key in GRAMMARS if key in params]
    if len(given) > 1:
        raise BadRequest(f"{name}.{given[1]}: only one of {', '.join(GRAMMARS)} may be given")
    if not given:
        return None
    value = params.pop(given[0])
    if not isinstance(value, str) and not (given[0] == "json_schema" and isinstance(value, dict)):
        raise BadRequest(f"{name}.{given[0]}: must be a string")
    return {GRAMMARS[given[0]]: value}


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
    _check_kept(samplings, wanted, logprobs, pictures)
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


def _check_kept(
    samplings: list[Sampling], wanted: list[bool], logprobs: list[Logprobs], pictures: Sequence[tuple[str, ...]]
) -> None:
    """The kept tokens are vLLM's alternatives that are possible."""
    for sampling, has_logprobs, one, shown in zip(samplings, wanted, logprobs, pictures, strict=True):
        if sampling.kept and not has_logprobs:
            raise BadRequest(f"{KEPT}: needs return_logprob")
        if sampling.kept and (one.ids or shown):
            raise BadRequest(f"{KEPT}: cannot be combined with {'token_ids_logprob' if one.ids else PICTURES}")


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
