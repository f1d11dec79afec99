"""Checks a sample request against its bounds and the inference server's features, and makes the job.

A job holds its prompt as the JSON that goes to the inference server: a list of 512 numbers takes some 18 kB in hundreds
of objects, which the garbage collector looks at in each of its passes while the sample is in flight. As JSON they are
one object of some 2.5 kB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec
import numpy as np

from skyrl.base.pictures.picture import Pictures
from skyrl.base.types.context_limits import ContextLimits
from skyrl.base.types.weights import WeightsRef
from skyrl.base.wire.errors import RequestError, whose_vocabulary
from skyrl.base.wire.sample_request import Distribution, SampleRequest, tokens_of
from skyrl.base.wire.tensors import WireTensor, tensor_from_json
from skyrl.inference.features import InferenceFeatures

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[int]).decode


class PackedPrompt(Sequence[int]):
    """Reads like a list, but an item costs as much as all of them: take `[:]` before many."""

    __slots__ = ("_length", "json")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.json = msgspec.Raw(_encode(tokens))
        self._length = len(tokens)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return _decode(self.json)[index]

    def __eq__(self, other: object) -> bool:
        return self[:] == (other[:] if isinstance(other, PackedPrompt) else other)

    __hash__ = None  # type: ignore[assignment]


def as_json(prompt: Sequence[int]) -> msgspec.Raw | Sequence[int]:
    """What msgspec encodes for this prompt."""
    return prompt.json if isinstance(prompt, PackedPrompt) else prompt


VLLM_MAX_TEMPERATURE = 2.0


class FeatureGuard:
    """Checks requests against the features of the inference server."""

    def __init__(self, features: InferenceFeatures) -> None:
        self._features = features

    def check(self, request: SampleRequest) -> None:
        """Raises RequestError naming the field."""
        if not self._features.prompt_scores:
            for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
                if getattr(request, field):
                    raise RequestError(
                        "needs skyrl's plugin in vLLM; this inference server does not have it", field=field
                    )
        temperature = request.sampling_params.temperature
        if temperature > VLLM_MAX_TEMPERATURE and not self._features.any_temperature:
            raise RequestError(
                f"must be in [0, {VLLM_MAX_TEMPERATURE:g}] with this inference server, got {temperature}",
                field="sampling_params.temperature",
            )
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            self.check_prompt_logprobs()

    def check_prompt_logprobs(self) -> None:
        """A request for logprobs of the prompt. Raises RequestError."""
        if not self._features.prompt_logprobs:
            raise RequestError(
                "needs skyrl's plugin in vLLM, without which vLLM may compute them with another adapter; the operator "
                "can install a version of vLLM that the plugin is for",
                field="prompt_logprobs",
            )


MAX_NUM_SAMPLES = 4096
MAX_TOPK = 64
"""The managed vLLM is started with one more (`--max-logprobs`)."""
MAX_PROMPT_SCORES = 2**17
"""Target ids and drawn tokens of one request, times 1 + topk_prompt_logprobs, the cells that vLLM sends."""
MAX_PROMPT_CELLS = 2**19
"""Prompt tokens, times 1 + topk_prompt_logprobs, of a request for prompt logprobs. vLLM's answer has some 80 bytes for
each, or 11 with skyrl's plugin, and vLLM's front end does nothing else while it writes them."""
MAX_ECHOED = 2**24
"""Prompt tokens, times `num_samples`: vLLM repeats the ids of the prompt for every sequence, some 7 bytes each."""
MAX_SAMPLED = 2**24
"""`num_samples` times `max_tokens`, times 1 + topk_sample_logprobs. The answer also has a bound in bytes, see
`answer_bound`."""
MAX_STOP_STRINGS = 64
"""The managed vLLM is started with this bound (its default is 4)."""
MAX_SEED = 2**63 - 2**15
"""Seeds of requests have 64 bits. vLLM takes signed 64 bits, and gives sample i of a request the seed `seed + i`."""


# Every sample makes one. As a frozen dataclass that would take three times as long.
class SampleJob(msgspec.Struct, frozen=True):
    """A checked request.

    `prompt` is a `PackedPrompt` if `make_job` made the job.

    The job samples from `weights`; `model` is the name by which the inference servers know them. A sequence ends at
    EOS, at one of `stop_strings` or at one of `stop_token_ids`. With `ignore_eos`, which an empty stop list sets, it
    does not end at EOS. `seed` is in [0, 2**63 - 2**15). `max_tokens` fits the context; None if the context is not
    known yet. `target` holds token ids (int64, -1 for none), one row per prompt token but the first. `alternatives`
    tokens are drawn in place of each prompt token but the first. `pictures` are None for a prompt of text alone, and
    only such a job goes to `/v1/completions`. The answer must begin with the weights that the
    inference servers call `version`; None if they never change their weights.
    """

    request_id: str
    session_key: str
    model: str
    weights: WeightsRef
    prompt: Sequence[int]
    num_samples: int
    max_tokens: int | None
    distribution: Distribution
    seed: int | None
    stop_strings: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    prompt_logprobs: bool
    prompt_logprobs_last_n: int | None
    topk_prompt: int
    topk_sample: int
    target: WireTensor | None = None
    alternatives: int = 0
    version: str | None = None
    pictures: Pictures | None = None

    @property
    def sampling_session(self) -> str:
        """`session_key` is `<sampling session>:<seq_id>`."""
        return self.session_key.rpartition(":")[0]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def greedy(self) -> bool:
        return self.distribution.temperature == 0.0

    @property
    def wants_prompt(self) -> bool:
        """Whether the answer needs rows of the prompt."""
        return self.prompt_logprobs or self.topk_prompt > 0 or self.target is not None or self.alternatives > 0

    @property
    def prompt_cells(self) -> int:
        """The logprobs of prompt tokens that vLLM sends for it, without target ids and draws."""
        return len(self.prompt) * (1 + self.topk_prompt) if self.wants_prompt else 0

    @property
    def most_tokens(self) -> int:
        """The prompt's tokens and the most tokens that may be sampled; an unknown `max_tokens` counts as 0."""
        return len(self.prompt) + self.num_samples * (self.max_tokens or 0)


def _check(request: SampleRequest, prompt: list[int], limits: ContextLimits) -> None:
    params = request.sampling_params
    vocab_size = limits.vocab_size
    if (
        vocab_size is not None
        and vocab_size != request.checked_vocab
        and not 0 <= min(prompt) <= max(prompt) < vocab_size
    ):
        bad = next(t for t in prompt if not 0 <= t < vocab_size)
        allowed = f"[0, {vocab_size}){whose_vocabulary(limits.base_model)}"
        raise RequestError(f"token id {bad} is not in {allowed}", field="prompt")
    if limits.max_context is not None and len(prompt) >= limits.max_context:
        raise RequestError(
            f"{len(prompt)} tokens leave no room to sample in a context of {limits.max_context}{limits.bound}",
            field="prompt",
        )
    _check_range("num_samples", request.num_samples, 1, MAX_NUM_SAMPLES)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError(f"must be at least 1, got {params.max_tokens}", field="sampling_params.max_tokens")
    params.check()
    if params.seed is not None and not -(2**63) <= params.seed < 2**64:
        raise RequestError("must fit 64 bits", field="sampling_params.seed")
    _check_range("topk_sample_logprobs", request.topk_sample_logprobs, 0, MAX_TOPK)
    _check_range("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, MAX_TOPK)
    _check_last_n(request, len(prompt))


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"must be in [{low}, {high}], got {value}", field=field)


def _check_last_n(request: SampleRequest, length: int) -> None:
    field = "prompt_logprobs_last_n"
    if request.prompt_logprobs_last_n is None:
        return
    if not request.prompt_logprobs:
        raise RequestError("applies to prompt logprobs; set prompt_logprobs too", field=field)
    _check_range(field, request.prompt_logprobs_last_n, 1, length - 1)


def _check_answer_size(request: SampleRequest, length: int, max_tokens: int | None) -> None:
    """Bounds the size of vLLM's answer. Raises RequestError naming the field."""
    _check_sampled(request, max_tokens)
    wants_rows = request.prompt_logprobs or request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k
    columns = 1 + request.topk_prompt_logprobs
    if (wants_rows or columns > 1) and length * columns > MAX_PROMPT_CELLS:
        extra = "" if columns == 1 else f" with topk_prompt_logprobs={request.topk_prompt_logprobs}"
        raise RequestError(
            f"a prompt of {length} tokens is longer than the {MAX_PROMPT_CELLS // columns} whose logprobs one request "
            f"may ask for{extra}",
            field="prompt_logprobs" if columns == 1 else "topk_prompt_logprobs",
        )
    if request.sampling_params.temperature and length * request.num_samples > MAX_ECHOED:
        raise RequestError(
            f"{request.num_samples} samples of a prompt of {length} tokens are more than the {MAX_ECHOED // length} "
            "that one request may ask for",
            field="num_samples",
        )


def _check_sampled(request: SampleRequest, max_tokens: int | None) -> None:
    columns = 1 + request.topk_sample_logprobs
    if request.num_samples * (max_tokens or 1) * columns > MAX_SAMPLED:
        extra = "" if columns == 1 else f" with topk_sample_logprobs={request.topk_sample_logprobs}"
        raise RequestError(
            f"{request.num_samples} samples of up to {max_tokens} tokens are more than the {MAX_SAMPLED // columns} "
            f"tokens that one request may sample{extra}",
            field="num_samples",
        )


def _decode_target(request: SampleRequest, length: int, limits: ContextLimits) -> WireTensor | None:
    field = "target_prompt_logprobs"
    if request.target_prompt_logprobs is None:
        return None
    target = tensor_from_json(request.target_prompt_logprobs, field)
    if target.values.dtype != np.int64:
        raise RequestError("must be an int64 tensor of token ids", field=field)
    if len(target.shape) != 2 or target.shape[0] != length - 1:
        raise RequestError(
            f"must have the shape [{length - 1}, K] for a prompt of {length} tokens, got {list(target.shape)}",
            field=field,
        )
    highest = 2**31 if limits.vocab_size is None else limits.vocab_size
    wrong = target.values[(target.values < -1) | (target.values >= highest)]
    if len(wrong):
        allowed = f"[0, {highest}){whose_vocabulary(limits.base_model)}"
        raise RequestError(f"token id {wrong[0]} is neither -1 nor in {allowed}", field=field)
    if not (target.values >= 0).any():
        raise RequestError("must name at least one token id", field=field)
    return target


def _check_scores(request: SampleRequest, length: int, target: WireTensor | None) -> None:
    _check_range("prompt_alt_tokens_k", request.prompt_alt_tokens_k, 0, MAX_TOPK)
    named = 0 if target is None else int((target.values >= 0).sum())
    drawn = request.prompt_alt_tokens_k * (length - 1)
    columns = 1 + request.topk_prompt_logprobs
    if (named + drawn) * columns > MAX_PROMPT_SCORES:
        extra = "" if columns == 1 else f" with topk_prompt_logprobs={request.topk_prompt_logprobs}"
        raise RequestError(
            f"{named} target ids and {drawn} draws are more than the {MAX_PROMPT_SCORES // columns} that one request "
            f"may ask for{extra}",
            field="target_prompt_logprobs" if named >= drawn else "prompt_alt_tokens_k",
        )


def _stop_lists(stop: str | list[str | int] | None, limits: ContextLimits) -> tuple[list[str], list[int]]:
    field = "sampling_params.stop"
    entries: list[str | int] = [stop] if isinstance(stop, str) else list(stop or [])
    strings = [entry for entry in entries if isinstance(entry, str)]
    ids = [entry for entry in entries if not isinstance(entry, str)]
    if strings and ids:
        raise RequestError("must be all strings or all token ids, not both", field=field)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", field=field)
    if "" in strings:
        raise RequestError("must not hold the empty string", field=field)
    if limits.vocab_size is not None and any(not 0 <= token < limits.vocab_size for token in ids):
        raise RequestError(f"token ids must be in [0, {limits.vocab_size})", field=field)
    return strings, ids


def make_job(
    request: SampleRequest,
    *,
    request_id: str,
    session_key: str,
    model: str,
    weights: WeightsRef,
    limits: ContextLimits,
    version: str | None = None,
    pictures: Pictures | None = None,
) -> SampleJob:
    """The job for a request, whose prompt is tokens alone. Raises RequestError naming the field."""
    params = request.sampling_params
    prompt = tokens_of(request.prompt)
    _check(request, prompt, limits)
    target = _decode_target(request, len(prompt), limits)
    _check_scores(request, len(prompt), target)
    strings, ids = _stop_lists(params.stop, limits)
    max_tokens = params.max_tokens
    if limits.max_context is not None:
        fitting = limits.max_context - len(prompt)
        max_tokens = fitting if max_tokens is None else min(max_tokens, fitting)
    _check_answer_size(request, len(prompt), max_tokens)
    return SampleJob(
        request_id=request_id,
        session_key=session_key,
        model=model,
        weights=weights,
        prompt=PackedPrompt(prompt),
        num_samples=request.num_samples,
        max_tokens=max_tokens,
        distribution=params.distribution,
        seed=None if params.seed is None else params.seed % MAX_SEED,
        stop_strings=strings,
        stop_token_ids=ids,
        ignore_eos=params.stop == [],
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt=request.topk_prompt_logprobs,
        topk_sample=request.topk_sample_logprobs,
        target=target,
        alternatives=request.prompt_alt_tokens_k,
        version=version,
        pictures=pictures,
    )
