"""JSON request bodies as msgspec structs: decoding checks types and names the field at fault.

Lenient where old SDKs are: explicit nulls, missing defaults and `type` tags, unknown fields. Ranges are checked where
they are used.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from skyrl.wire.errors import RequestError
from skyrl.wire.tensors import JsonTensor

S = TypeVar("S", bound=msgspec.Struct)

MAX_NOTES_BYTES = 16 * 2**10
"""What a client may note on one of its things, as JSON: it is kept for ever, and becomes many times as much in memory
where lists show a thousand things."""
MAX_NOTES_DEPTH = 32
"""Objects and lists in each other: what can be read can still be too deep to be written again."""


def _deeper(notes: object, levels: int) -> bool:
    within = notes.values() if isinstance(notes, dict) else notes if isinstance(notes, list) else None
    return within is not None and (levels == 0 or any(_deeper(value, levels - 1) for value in within))


def _check_notes(field: str, notes: object) -> None:
    """Raises RequestError naming the field."""
    if _deeper(notes, MAX_NOTES_DEPTH):
        raise RequestError(f"must not be nested more than {MAX_NOTES_DEPTH} deep", field=field)
    if notes and (size := len(msgspec.json.encode(notes))) > MAX_NOTES_BYTES:
        raise RequestError(f"must have at most {MAX_NOTES_BYTES} bytes as JSON, got {size}", field=field)


class CreateSessionRequest(msgspec.Struct):
    tags: list[str] | None = None
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None

    def __post_init__(self) -> None:
        for field in ("tags", "user_metadata", "sdk_version"):
            _check_notes(field, getattr(self, field))


class SessionRequest(msgspec.Struct):
    session_id: str


FINISH_REASONS = ("success", "errored", "interrupted")


class FinishReason(msgspec.Struct):
    type: str


class FinishSessionRequest(msgspec.Struct):
    reason: FinishReason | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        _check_notes("detail", self.detail)


class LoraConfig(msgspec.Struct):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct):
    """`type` travels under that very name, so the struct must not claim it as a tag."""

    type: str = "adamw"


class CreateModelRequest(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None

    def __post_init__(self) -> None:
        _check_notes("user_metadata", self.user_metadata)


class ModelRequest(msgspec.Struct):
    model_id: str


class SequencedRequest(msgspec.Struct):
    """What routing needs of a training command; the rest is decoded by who runs it."""

    model_id: str
    seq_id: int | None = None


class AdamParams(msgspec.Struct):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None


class SaveWeightsRequest(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        _check_notes("user_metadata", self.user_metadata)


class SaveWeightsForSamplerRequest(SaveWeightsRequest):
    sampling_session_seq_id: int | None = None


class SaveWeightsExternalRequest(SaveWeightsRequest):
    age_encryption_recipients: list[str] | None = None


class LoadWeightsRequest(msgspec.Struct):
    """Both addressings: (session_id, model_seq_id) makes a model, (model_id, seq_id) loads into one."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    def __post_init__(self) -> None:
        _check_notes("user_metadata", self.user_metadata)


class LoadTarget(msgspec.Struct):
    """What routing needs of a LoadWeightsRequest."""

    model_id: str | None = None
    seq_id: int | None = None


RESOLVED = ("source_tenant", "refused", "loaded_key")
"""Fields of a LoadWeightsCommand that the server writes, and no client."""


class LoadWeightsCommand(msgspec.Struct):
    """A LoadWeightsRequest as the command log keeps it: in place of the access token, the tenant it stands for (None:
    the model's own), or why it was refused. `loaded_key` is the store's key of the checkpoint that was loaded; None
    before the load is done, and for loads of versions that did not write it."""

    path: str
    optimizer: bool = False
    source_tenant: str | None = None
    refused: str | None = None
    loaded_key: str | None = None


class CopyWeightsRequest(msgspec.Struct):
    """Copies into a new model of a session (session_id, model_seq_id), or of a session made for it in a project."""

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class TtlRequest(msgspec.Struct):
    ttl_seconds: int | None = None


class WeightsInfoRequest(msgspec.Struct):
    tinker_path: str


class CreateSamplingSessionRequest(msgspec.Struct):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSessionRequest(msgspec.Struct):
    sampling_session_id: str


class RetrieveFutureRequest(msgspec.Struct):
    request_id: str
    allow_metadata_only: bool | None = None


class CancelFutureRequest(msgspec.Struct):
    request_id: str


class FuturesTarget(msgspec.Struct):
    sampling_session_id: str
    type: str = "sampling_session"
    cloned_sampler_id: int = 0


class RetrieveFuturesRequest(msgspec.Struct):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] | None = None  # checked only: what was read is not kept in memory anyhow


class AssignProjectRequest(msgspec.Struct):
    project_id: str


class SearchOwner(msgspec.Struct):
    """`owner_urns` is for type `user` alone."""

    type: str = "own"
    owner_urns: list[str] | None = None


class SessionStatusQuery(msgspec.Struct):
    """`reasons` is for type `client_finished` alone."""

    type: str
    reasons: list[str] | None = None


class SessionSearchCursor(msgspec.Struct):
    last_created_at: datetime
    last_session_id: str


class SessionSearchRequest(msgspec.Struct):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    owner: SearchOwner | None = None
    statuses: list[SessionStatusQuery] | None = None
    limit: int = 50
    cursor: SessionSearchCursor | None = None


class Chunk(msgspec.Struct):
    """The chunk kind is read from which field is there: 0.16 sends no `type`."""

    tokens: list[int] | None = None
    data: str | None = None
    location: str | None = None
    dmel: str | None = None


class ModelInput(msgspec.Struct):
    chunks: list[Chunk]


class SamplingParams(msgspec.Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct):
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


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode_json(kind: type[S], body: bytes) -> S:
    """Raises RequestError naming the field (a JSON path without the leading `$.`)."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def _refusal(text: str) -> RequestError:
    """msgspec's sentence, "What is wrong - at `$.the.field`", as ours."""
    problem, _, path = text.rpartition(" - at `$")
    field = path.rstrip("`").lstrip(".") if problem else ""
    if (missing := _MISSING.fullmatch(problem or text)) is not None:
        return RequestError("is missing", field=f"{field}.{missing[1]}" if field else missing[1])
    return RequestError(problem or text, field=field or None)


def tokens_of(prompt: ModelInput, field: str = "prompt") -> list[int]:
    """All token ids of a text-only input, in order. Raises RequestError for empty input and for other chunk kinds."""
    if len(prompt.chunks) == 1 and prompt.chunks[0].tokens:
        return prompt.chunks[0].tokens
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.tokens is None:
            raise RequestError(
                "only encoded_text chunks are served; the base model takes text only",
                field=f"{field}.chunks[{index}]",
            )
        tokens += chunk.tokens
    if not tokens:
        raise RequestError("must hold at least one token", field=field)
    return tokens
