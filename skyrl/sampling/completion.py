"""The codec between a sample job and vLLM: encodes requests to `/v1/completions`, and decodes complete answers.

`prompt_answer` reads the prompt's part of an answer. `pictures` encodes the requests of the other route, for prompts
with pictures; its answers are decoded here, too. Does not know connections, retries or futures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import astuple

from skyrl.base.pictures.picture import Pictures
from skyrl.base.wire.results import SampledSequence, SampleResult, TopkRow, encode_sample
from skyrl.sampling.job import SampleJob, as_json
from skyrl.sampling.metrics import Used
from skyrl.sampling.prompt_answer import MalformedAnswer, PromptAnswer, prompt_scores
from skyrl.sampling.servers import NOT_TOLD, check_began, spans_in

PATH = "/v1/completions"
TOKEN_ID_PREFIX = "token_id:"
LARGE_BYTES = 256 * 2**10
"""A larger answer is decoded on a thread, one choice at a time. Decoded at once on the event loop, an answer of 30 MB
would stop the loop for 0.2 s."""
MINUS_INFINITY = -9999.0
"""vLLM writes this number for minus infinity, which JSON lacks."""


STOP_TOKEN = "stop_token"
"""What some inference servers say for "stop" where a token ended the sequence."""
ENDED: dict[str | None, Literal["stop", "length"]] = {"stop": "stop", STOP_TOKEN: "stop", "length": "length"}
"""The `finish_reason` of a whole sequence, and what it is called here."""


class MissingLogprobs(MalformedAnswer):
    """Tokens without their log-probabilities."""


class SampleAnswer(Used, kw_only=True):
    """A decoded answer: `body` is the encoded SampleResponse.

    `upstream_s` is how long the server had the request, in seconds; the client sets it. `changed_weights`: the weights
    changed while a sequence was sampled. `server` is the replica that a router has named, see `FairOrder.leave`.
    """

    body: bytes
    upstream_s: float = 0.0
    changed_weights: bool = False
    server: str | None = None


class AbortedAnswer(Exception):
    """vLLM aborted the request: the `finish_reason` is none of ENDED."""


class _Cell(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None = None
    top_logprobs: msgspec.Raw = NOT_TOLD


class _Logprobs(msgspec.Struct):
    """`content` is in answers to requests with pictures, the others are in all others. Rows of `top_logprobs` are read
    only where they are asked for: vLLM sends a row for every token in any case, and to decode these rows takes as long
    as all else."""

    token_logprobs: list[float | None] | None = None
    top_logprobs: msgspec.Raw = NOT_TOLD
    content: list[_Sampled] | None = None


class Choice(msgspec.Struct):
    """One sequence of an answer."""

    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    """Undecoded rows. As objects, all rows together would take several times the memory of the body. An answer to a
    request with pictures has them once, beside the choices."""
    prompt_cells: bytes | None = None
    """The same from vLLM with skyrl's plugin: see `PROMPT_CELLS`."""
    weight_versions: msgspec.Raw = NOT_TOLD
    """Read only where servers change their weights."""
    cached_prompt_tokens: int | None = None
    """Of several sequences, those that this one found in the prefix cache. Servers without skyrl's plugin do not tell
    it, nor do answers to requests with pictures."""

    def sampled_logprobs(self) -> list[float | None] | None:
        """One for each token; None if the answer has no logprobs."""
        if self.logprobs is None or self.logprobs.content is None:
            return None if self.logprobs is None else self.logprobs.token_logprobs
        return [sampled.logprob for sampled in self.logprobs.content]

    def cells(self) -> Sequence[Sequence[tuple[int, float]]]:
        """For each token the most likely tokens with their logprobs, in any order; empty if the answer has none.
        Raises msgspec.DecodeError and ValueError."""
        if self.logprobs is None:
            return []
        if self.logprobs.content is not None:
            lists = (_cells_decoder.decode(sampled.top_logprobs) or [] for sampled in self.logprobs.content)
            return [[(cell.token_id, cell.logprob) for cell in cells] for cells in lists]
        rows = _rows_decoder.decode(self.logprobs.top_logprobs) or []
        return [[(int(key.removeprefix(TOKEN_ID_PREFIX)), value) for key, value in (row or {}).items()] for row in rows]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """The numbers of tokens that an answer of the inference server tells, on every route. `used`, `cached` and
    `reasoning` are never negative: metrics refuse to count such numbers."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """How many of the prompt's tokens came from the prefix cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else max(0, details.cached_tokens or 0)

    @property
    def reasoning(self) -> int:
        """How many of the sampled tokens are thinking."""
        details = self.completion_tokens_details
        return 0 if details is None else max(0, details.reasoning_tokens or 0)

    def used(self) -> Used:
        prompt = max(0, self.prompt_tokens or 0)
        return Used(prompt, min(self.cached, prompt), max(0, self.completion_tokens or 0))


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class AnswerParts(msgspec.Struct, kw_only=True):
    """An answer beside its choices. All but `usage` are told of requests with pictures alone."""

    usage: AnswerUsage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_cells: bytes | None = None


class _Answer(AnswerParts, kw_only=True):
    choices: list[Choice]


class _LargeAnswer(AnswerParts, kw_only=True):
    """A large answer with undecoded choices. All other threads wait while msgspec decodes, so each choice is decoded in
    a call of its own."""

    choices: list[msgspec.Raw]


_encoder = msgspec.json.Encoder()
_answer_decoder = msgspec.json.Decoder(_Answer)
_large_decoder = msgspec.json.Decoder(_LargeAnswer)
_choice_decoder = msgspec.json.Decoder(Choice)
_rows_decoder = msgspec.json.Decoder(list[dict[str, float] | None] | None)
_cells_decoder = msgspec.json.Decoder(list[_Cell] | None)


def encode_request(job: SampleJob, priority: int | None = None) -> bytes:
    """The body to post. The server runs requests with lower `priority` first; None if the server ignores priorities."""
    params = sampling_params(job)
    params["logprobs"] = job.topk_sample
    if job.wants_prompt and (scores := prompt_scores(job)) is not None:
        params["vllm_xargs"] = scores.to_extra_args()
    if priority is not None:
        params["priority"] = priority
    if job.topk_sample:
        params["return_tokens_as_token_ids"] = True  # keys by text would merge tokens that have the same text
    return _encoder.encode(
        {"model": job.model, "prompt": as_json(job.prompt), **params, "return_token_ids": True, "stream": False}
    )


def sampling_params(job: SampleJob) -> dict[str, Any]:
    """The parameters that both routes of vLLM know by these names. A greedy job asks for one sequence: vLLM refuses
    n > 1, and all sequences would be equal."""
    params: dict[str, Any] = {
        "n": 1 if job.greedy else job.num_samples,
        "max_tokens": job.max_tokens,
        **msgspec.structs.asdict(job.distribution),
    }
    if job.seed is not None:
        params["seed"] = job.seed
    if job.stop_strings:
        # vLLM looks for stop strings in the text. Special tokens are in the text only if they are not skipped.
        params |= {"stop": job.stop_strings, "skip_special_tokens": False}
    if job.stop_token_ids:
        params["stop_token_ids"] = job.stop_token_ids
    if job.ignore_eos:
        params["ignore_eos"] = True
    if job.wants_prompt:
        params["prompt_logprobs"] = job.topk_prompt
    return params


def decode_answer(body: bytes, job: SampleJob, *, zero_fill: bool = False) -> SampleAnswer:
    """The SampleResponse for a 2xx answer, with its token counts. Logprobs of the prompt at places of a picture are
    those of `image_token_id`, as vLLM computes them.

    `zero_fill` accepts tokens without logprobs and gives them 0.0. Raises MalformedAnswer, OtherTokens,
    MissingLogprobs, AbortedAnswer, OtherWeights.
    """
    try:
        answer = (_answer_decoder if len(body) <= LARGE_BYTES else _large_decoder).decode(body)
        choices = [
            _choice_decoder.decode(choice) if isinstance(choice, msgspec.Raw) else choice for choice in answer.choices
        ]
    except (msgspec.DecodeError, ValueError) as error:
        kind = "completion" if job.pictures is None else "generation"
        raise MalformedAnswer(f"not a {kind}: {error}") from error
    expected = 1 if job.greedy else job.num_samples
    if len(choices) != expected:
        raise MalformedAnswer(f"{len(choices)} choices for {expected} samples")
    choices.sort(key=lambda choice: choice.index)
    for choice in choices:  # before other checks: an aborted answer may lack the parts that they need
        if choice.finish_reason not in ENDED:
            raise AbortedAnswer(f"finish_reason {choice.finish_reason!r}")
    if job.pictures is not None:
        check_prompt(answer, job.prompt[:], job.pictures)
        choices[0].prompt_logprobs, choices[0].prompt_cells = answer.prompt_logprobs, answer.prompt_cells
    if job.version is not None:
        check_began((spans_in(choice.weight_versions) for choice in choices), job.version)
    try:
        return _encode(choices, answer.usage, job, zero_fill)
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"not a completion: {error}") from error
    except (ValueError, OverflowError) as error:
        raise MalformedAnswer(f"not token ids: {error}") from error


class OtherTokens(MalformedAnswer):
    """The inference server's processor has made other tokens of the prompt than this server."""


def check_prompt(answer: AnswerParts, prompt: Sequence[int], pictures: Pictures) -> None:
    """Raise OtherTokens unless vLLM has computed the prompt of the job."""
    if answer.prompt_token_ids == prompt:
        return
    found = (answer.mm_placeholders or {}).get("image", [])
    for number, (picture, placed) in enumerate(zip(pictures.placed, found, strict=False)):
        if picture.tokens != placed.length:
            raise OtherTokens(
                f"the inference server made {placed.length} tokens of image {number + 1} of the prompt, and this "
                f"server counted {picture.tokens}: their image processors have different settings"
            )
    raise OtherTokens(
        f"the inference server made a prompt of {len(answer.prompt_token_ids or [])} tokens, and the request has "
        f"{len(prompt)}, with other ids"
    )


def _encode(choices: Sequence[Choice], usage: AnswerUsage | None, job: SampleJob, zero_fill: bool) -> SampleAnswer:
    sequences = [_sequence(choice, job, zero_fill) for choice in choices]
    if job.greedy:
        sequences = sequences * job.num_samples
    prompt = PromptAnswer(choices[0].prompt_logprobs, choices[0].prompt_cells, job) if job.wants_prompt else None
    result = SampleResult(
        sequences,
        None if prompt is None else prompt.logprobs,
        None if prompt is None else prompt.topk,
        0 if usage is None else min(usage.cached, len(job.prompt)),
        None if prompt is None else prompt.target_logprobs(),
        None if prompt is None else prompt.alternatives(),
    )
    surprise, known = (0.0, 0) if job.greedy or zero_fill else _surprise(sequences)
    return SampleAnswer(
        body=encode_sample(result, topk_sample=job.topk_sample, topk_prompt=job.topk_prompt),
        prompt_tokens=len(job.prompt),
        cached_tokens=result.cached_tokens,
        sampled_tokens=sum(len(sequence.tokens) for sequence in sequences),
        changed_weights=any(len(sequence.weight_versions or ()) > 1 for sequence in sequences),
        computed_again=_computed_again(choices, len(job.prompt), result.cached_tokens),
        samples=len(choices),
        truncated=sum(choice.finish_reason == "length" for choice in choices),
        surprise=surprise,
        surprise_tokens=known,
    )


def _surprise(sequences: Sequence[SampledSequence]) -> tuple[float, int]:
    """The sum of -logprob over the sampled tokens, and their number."""
    total, tokens = 0.0, 0
    for sequence in sequences:
        total -= sum(sequence.logprobs)
        tokens += len(sequence.tokens)
    return total, tokens


def _computed_again(choices: Sequence[Choice], prompt: int, cached: int) -> int:
    """`SampleAnswer.computed_again` of a prompt of so many tokens, of which `cached` were found in the cache."""
    found = [choice.cached_prompt_tokens for choice in choices]
    computed = sum(prompt - each for each in found if each is not None)
    return max(0, computed - (prompt - cached)) if None not in found else 0


def _sequence(choice: Choice, job: SampleJob, zero_fill: bool) -> SampledSequence:
    if choice.token_ids is None:
        raise MalformedAnswer("no token_ids")
    logprobs = choice.sampled_logprobs()
    if logprobs is None and choice.token_ids:
        if not zero_fill:
            raise MissingLogprobs("no logprobs for the sampled tokens")
        logprobs = [0.0] * len(choice.token_ids)
    logprobs = logprobs or []
    if len(logprobs) != len(choice.token_ids):
        raise MalformedAnswer(f"{len(logprobs)} logprobs for {len(choice.token_ids)} tokens")
    if None in logprobs:
        if not zero_fill:
            raise MissingLogprobs("a sampled token has no logprob")
        logprobs = [0.0 if value is None else value for value in logprobs]
    topk = _sample_topk(choice) if job.topk_sample else None
    return SampledSequence(
        ENDED[choice.finish_reason],
        choice.token_ids,
        cast("list[float]", logprobs),
        topk,
        None if job.version is None else [*map(astuple, spans_in(choice.weight_versions) or ())],
    )


def _sample_topk(choice: Choice) -> list[TopkRow]:
    rows = choice.cells()
    if len(rows) != len(choice.token_ids or []):
        raise MalformedAnswer("top_logprobs do not match the tokens")
    # top_p and top_k give tokens minus infinity
    return [[cell for cell in row if cell[1] > MINUS_INFINITY] for row in rows]
