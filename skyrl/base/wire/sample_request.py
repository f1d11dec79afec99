"""The body of a sample request, and the token input that sample requests share with training requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, ClassVar, cast

import msgspec

from skyrl.base.wire.decoding import decode_json
from skyrl.base.wire.errors import RequestError
from skyrl.base.wire.images import ImagePart
from skyrl.base.wire.tensors import JsonTensor


class Chunk(msgspec.Struct):
    """A part of an input. The field that is set tells the kind of the chunk: SDK 0.16 sends no `type`."""

    tokens: list[int] | None = None
    data: str | None = None
    location: str | None = None
    dmel: str | None = None
    format: str | None = None
    expected_tokens: int | None = None


class ModelInput(msgspec.Struct):
    chunks: list[Chunk]


class Distribution(msgspec.Struct):
    """From which distribution each token is drawn. vLLM has all these fields under the same names, so a new field gets
    from the request to vLLM by its line here. `check` has its bounds."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def __post_init__(self) -> None:
        self.top_k = self.top_k or -1  # both are off

    def check(self) -> None:
        """Raises RequestError naming the field."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise _out_of_range("temperature", f"must be 0 (greedy) or a positive number, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", f"must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise _out_of_range("top_k", f"must be -1 (off) or at least 1, got {self.top_k}")


def _out_of_range(name: str, message: str) -> RequestError:
    return RequestError(message, field=f"sampling_params.{name}")


class SamplingParams(Distribution):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None

    @property
    def distribution(self) -> Distribution:
        """The fields of the distribution alone."""
        return Distribution(*(getattr(self, name) for name in Distribution.__struct_fields__))


class SampleRequest(msgspec.Struct):
    checked_vocab: ClassVar[int | None] = None
    """The decoder has found all ids of the prompt in [0, checked_vocab). None: it has not looked."""

    prompt: ModelInput
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    base_model: str | None = None
    model_path: str | None = None


def decode_sample_request(body: bytes, vocab_size: int | None) -> SampleRequest:
    """The request in a body. The decoder looks at the ids of the prompt, too, because to look at them afterwards takes
    longer than to decode them. A request with an id outside of the vocabulary is returned with `checked_vocab` None.
    Raises RequestError naming the field."""
    if vocab_size is not None:
        try:
            return _checking_decoder(vocab_size)(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass  # `decode_json` finds the fault again and names it, unless it is an id, which the caller names
    return decode_json(SampleRequest, body)


@lru_cache(maxsize=4)
def _checking_decoder(vocab_size: int) -> Callable[[bytes], SampleRequest]:
    token = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    chunk = msgspec.defstruct("Chunk", [("tokens", list[token] | None, None)], bases=(Chunk,))
    prompt = msgspec.defstruct("ModelInput", [("chunks", list[chunk])], bases=(ModelInput,))
    request = msgspec.defstruct(
        "SampleRequest",
        [("prompt", prompt)],
        bases=(SampleRequest,),
        namespace={"checked_vocab": vocab_size},
        kw_only=True,
    )
    return cast(Callable[[bytes], SampleRequest], msgspec.json.Decoder(request).decode)


def tokens_of(prompt: ModelInput, field: str = "prompt") -> list[int]:
    """All token ids of an input of text alone, in order. Raises RequestError for empty input and other kinds of
    chunks."""
    if len(prompt.chunks) == 1 and prompt.chunks[0].tokens:
        return prompt.chunks[0].tokens
    tokens, images = text_and_images(prompt, field)
    if images:
        raise RequestError("the base model takes text only", field=images[0].name)
    if not tokens:
        raise RequestError("must hold at least one token", field=field)
    return tokens


def text_and_images(prompt: ModelInput, field: str = "prompt") -> tuple[list[int], list[ImagePart]]:
    """The token ids of the text, in order, and the images between them. Raises RequestError for other kinds of
    chunks."""
    tokens: list[int] = []
    images: list[ImagePart] = []
    for index, chunk in enumerate(prompt.chunks):
        name = f"{field}.chunks[{index}]"
        if chunk.tokens is not None:
            tokens += chunk.tokens
        elif chunk.data is not None or chunk.location is not None:
            location, form = chunk.location or "", chunk.format or ""
            images.append(ImagePart(name, len(tokens), location, form, chunk.expected_tokens))
        else:
            raise RequestError("is neither text nor an image, and other chunks are not served", field=name)
    return tokens, images
