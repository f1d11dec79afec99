"""SGLang's sampling parameters as fields of vLLM's `/v1/completions`.

Every parameter is sent, also a default: otherwise the model's `generation_config.json` would decide in vLLM. Knows
neither prompts nor answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl.inference.sidecar.errors import BadRequest
from skyrl.inference.sidecar.fields import INT64_MAX, boolean, integer, mapping, number, string

DEFAULT_NEW_TOKENS = 128
GREEDY_UP_TO = 1e-6
MAX_SAMPLES = 16_384
"""vLLM's own bound of `n`."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""How SGLang and vLLM name what an output must match."""
_NO_BEAMS = "give n and temperature for several samples"
REFUSED = {
    "stop_regex": "name the texts in stop, or the tokens in stop_token_ids; regex is what a whole answer must match",
    "beam_width": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "custom_logit_processor": "logit_bias changes the logits of single tokens",
}
"""Without these, other tokens would be sampled; vLLM has no equivalent. What a client can use in their place."""
IGNORED = ("custom_params",)
"""Meant for extensions of SGLang; without the extension SGLang ignores them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """`max_new_tokens` is None if the client left it to the default, which the context may shorten. `fields` are for
    vLLM; the number of tokens and the seed are apart because they depend on the prompt and on the sample."""

    n: int
    max_new_tokens: int | None
    seed: int | None
    fields: dict[str, Any]

    def seed_of(self, child: int) -> int | None:
        """The seed of one of the n samples."""
        return None if self.seed is None else self.seed + child


def read_sampling(given: Any, name: str = "sampling_params") -> Sampling:
    """Raises BadRequest. A parameter that is null counts as omitted."""
    params = {} if given is None else {key: value for key, value in mapping(name, given).items() if value is not None}
    for key, instead in REFUSED.items():
        if params.pop(key, None) not in (None, False, 1, "", []):
            raise BadRequest(f"{name}.{key}: is not supported by vLLM; {instead}")
    for key in IGNORED:
        params.pop(key, None)
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
    return Sampling(n, new_tokens, seed, fields)


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
