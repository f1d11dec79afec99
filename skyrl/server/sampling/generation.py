"""The codec between a sample job with pictures and vLLM: encodes requests, and decodes answers if they are complete.

Knows the body of `/inference/v1/generate`, which takes token ids and pictures: in the request each picture has one
`image_token_id`, and vLLM's processor makes as many of it as the picture has tokens. `completion` makes the result.
Does not know connections, retries or where files are stored.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from skyrl.base.pictures.picture import Pictures
from skyrl.server.sampling.completion import ENDED, LARGE_BYTES, SampleAnswer, Usage, answer_of, sampling_params
from skyrl.server.sampling.job import SampleJob
from skyrl.server.sampling.loaded_weights import NOT_TOLD
from skyrl.server.sampling.prompt_answer import MalformedAnswer, prompt_scores
from skyrl.server.sampling.transport import Pieces

PATH = "/inference/v1/generate"
PIECE_BYTES = 192 * 2**10
"""How much of a file becomes base64 at a time: some 0.1 ms. Divisible by 3, so that the pieces' texts can be joined."""


class OtherTokens(MalformedAnswer):
    """The inference server's processor has made other tokens of the prompt than this server."""


class _Cell(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None = None
    top_logprobs: msgspec.Raw = NOT_TOLD
    """Read only where they are asked for."""


class _Logprobs(msgspec.Struct):
    content: list[_Sampled] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None
    """Not in the choice: the answer has them once."""
    weight_versions: msgspec.Raw = NOT_TOLD
    cached_prompt_tokens: int | None = None
    """Not told by this route."""

    @property
    def _content(self) -> list[_Sampled] | None:
        return None if self.logprobs is None else self.logprobs.content

    def sampled_logprobs(self) -> list[float | None] | None:
        content = self._content
        return None if content is None else [sampled.logprob for sampled in content]

    def cells(self) -> Sequence[Sequence[tuple[int, float]]]:
        rows = (_cells_decoder.decode(sampled.top_logprobs) or [] for sampled in self._content or [])
        return [[(cell.token_id, cell.logprob) for cell in row] for row in rows]


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Parts(msgspec.Struct, kw_only=True):
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None


class _Generation(_Parts, kw_only=True):
    choices: list[_Choice]


class _LargeGeneration(_Parts, kw_only=True):
    """As `completion` has it: a large answer's choices are decoded in calls of their own."""

    choices: list[msgspec.Raw]


_encoder = msgspec.json.Encoder()
_generation_decoder = msgspec.json.Decoder(_Generation)
_large_decoder = msgspec.json.Decoder(_LargeGeneration)
_choice_decoder = msgspec.json.Decoder(_Choice)
_cells_decoder = msgspec.json.Decoder(list[_Cell] | None)


def encode_request(job: SampleJob, priority: int | None, files: Mapping[str, bytes]) -> tuple[bytes, Pieces]:
    """The beginning of the body to post, and the rest, which is made while it is sent. `files`: by digest. `job` must
    have pictures."""
    assert job.pictures is not None
    params = sampling_params(job)
    # vLLM lists the sampled token first and cuts the list to this length, so one more keeps the k best whole.
    params["logprobs"] = job.topk_sample and job.topk_sample + 1
    if not job.stop_strings:
        params["detokenize"] = False  # saves the text, also of each logprob, which nobody reads
    if (scores := prompt_scores(job)) is not None:
        params["extra_args"] = scores.to_extra_args()
    fields = {
        "model": job.model,  # first: skyrl's router reads it in the beginning of a long body
        "token_ids": one_for_each(job.prompt[:], job.pictures),
        "sampling_params": params,
        "return_token_ids": True,
        "stream": False,
    }
    if priority is not None:
        fields["priority"] = priority
    start = _encoder.encode(fields)[:-1] + b',"content_parts":['
    heads = [
        b'%s{"type":"image_url","uuid":"%s","url":"data:image/%s;base64,'
        % (b"," if number else b"", picture.digest.encode(), picture.format.encode())
        for number, picture in enumerate(job.pictures.placed)
    ]
    pictures = [files[picture.digest] for picture in job.pictures.placed]
    size = sum(len(head) + _base64_length(len(data)) + 2 for head, data in zip(heads, pictures, strict=True)) + 2
    return start, Pieces(size, _pieces(heads, pictures))


def one_for_each(prompt: Sequence[int], pictures: Pictures) -> list[int]:
    """The prompt with one `image_token_id` for each picture."""
    tokens: list[int] = []
    end = 0
    for picture in pictures.placed:
        tokens += prompt[end : picture.start]
        tokens.append(pictures.image_token_id)
        end = picture.stop
    return [*tokens, *prompt[end:]]


def _pieces(heads: Sequence[bytes], pictures: Sequence[bytes]) -> Iterator[bytes]:
    for head, data in zip(heads, pictures, strict=True):
        yield head
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            yield binascii.b2a_base64(view[start : start + PIECE_BYTES], newline=False)
        yield b'"}'
    yield b"]}"


def _base64_length(size: int) -> int:
    return (size + 2) // 3 * 4


def decode_answer(body: bytes, job: SampleJob, *, zero_fill: bool = False) -> SampleAnswer:
    """The SampleResponse for a 2xx answer, with its token counts. Logprobs of the prompt at places of a picture are
    those of `image_token_id`, as vLLM computes them.

    `zero_fill` accepts tokens without logprobs and gives them 0.0. Raises MalformedAnswer, OtherTokens,
    MissingLogprobs, AbortedAnswer, OtherWeights.
    """
    try:
        answer = (_generation_decoder if len(body) <= LARGE_BYTES else _large_decoder).decode(body)
        choices = [
            _choice_decoder.decode(choice) if isinstance(choice, msgspec.Raw) else choice for choice in answer.choices
        ]
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedAnswer(f"not a generation: {error}") from error
    for choice in choices:
        choice.prompt_logprobs = answer.prompt_logprobs
    if all(choice.finish_reason in ENDED for choice in choices):  # if not, the answer may lack the prompt
        _check_prompt(answer, job)
    return answer_of(choices, answer.usage, job, zero_fill=zero_fill)


def _check_prompt(answer: _Parts, job: SampleJob) -> None:
    """Raise OtherTokens unless vLLM has computed the prompt of the job."""
    assert job.pictures is not None
    prompt = job.prompt[:]
    if answer.prompt_token_ids == prompt:
        return
    found = (answer.mm_placeholders or {}).get("image", [])
    for number, (picture, placed) in enumerate(zip(job.pictures.placed, found, strict=False)):
        if picture.tokens != placed.length:
            raise OtherTokens(
                f"the inference server made {placed.length} tokens of image {number + 1} of the prompt, and this "
                f"server counted {picture.tokens}: their image processors have different settings"
            )
    raise OtherTokens(
        f"the inference server made a prompt of {len(answer.prompt_token_ids or [])} tokens, and the request has "
        f"{len(prompt)}, with other ids"
    )
