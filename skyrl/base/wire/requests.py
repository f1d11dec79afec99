"""JSON request bodies as msgspec structs, but for sample requests (`sample_request`) and training passes (`training`).

Decoding checks types. Old SDKs send explicit nulls, leave out defaults and `type` tags, and send unknown fields; the
structs accept all of these. Ranges are checked by the code that uses a value.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec

from skyrl.base.wire.errors import RequestError

S = TypeVar("S", bound=msgspec.Struct)

MAX_METADATA_BYTES = 16 * 2**10
"""Size, as JSON, of the metadata that a client may attach to one object. The database keeps metadata for ever, and
lists of a thousand objects take many times their size in memory."""
MAX_METADATA_DEPTH = 32
"""Levels of nested objects and lists. JSON that can be decoded may still be too deep to be encoded again."""


def _is_deeper(value: object, levels: int) -> bool:
    """Whether `value` nests more than `levels` objects and lists."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return children is not None and (levels == 0 or any(_is_deeper(child, levels - 1) for child in children))


def check_metadata(field: str, value: object) -> None:
    """Raises RequestError naming the field."""
    if _is_deeper(value, MAX_METADATA_DEPTH):
        raise RequestError(f"must not be nested more than {MAX_METADATA_DEPTH} deep", field=field)
    if value and (size := len(msgspec.json.encode(value))) > MAX_METADATA_BYTES:
        raise RequestError(f"must have at most {MAX_METADATA_BYTES} bytes as JSON, got {size}", field=field)


class CreateSessionRequest(msgspec.Struct):
    tags: list[str] | None = None
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None

    def __post_init__(self) -> None:
        for field in ("tags", "user_metadata", "sdk_version"):
            check_metadata(field, getattr(self, field))


class SessionRequest(msgspec.Struct):
    session_id: str


FINISH_REASONS = ("success", "errored", "interrupted")


class FinishReason(msgspec.Struct):
    type: str


class FinishSessionRequest(msgspec.Struct):
    reason: FinishReason | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        check_metadata("detail", self.detail)


class LoraConfig(msgspec.Struct):
    """`rank_pattern` and `alpha_pattern` are PEFT's. The SDK has no such fields: see `skyrl.base.wire.rank_pattern`."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: Any = None


class OptimizerConfig(msgspec.Struct):
    """`type` is an ordinary field of the body. The struct must not use it as msgspec's tag."""

    type: str = "adamw"


class CreateModelRequest(msgspec.Struct):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None

    def __post_init__(self) -> None:
        check_metadata("user_metadata", self.user_metadata)


class ModelRequest(msgspec.Struct):
    model_id: str


class SequencedRequest(msgspec.Struct):
    """The fields of a training command by which the API routes it. The engine decodes the rest."""

    model_id: str
    seq_id: int | None = None


class AdamParams(msgspec.Struct, frozen=True):
    """One AdamW step as torch defines it (decoupled decay); `grad_clip_norm` 0 means no clipping. Defaults are
    Tinker's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(msgspec.Struct):
    """The SDK sends the values of every other optimizer as `optimizer_params`."""

    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: Any = None


class SaveWeightsRequest(msgspec.Struct):
    model_id: str
    seq_id: int | None = None
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        check_metadata("user_metadata", self.user_metadata)


class SaveWeightsForSamplerRequest(SaveWeightsRequest):
    sampling_session_seq_id: int | None = None


class SaveWeightsExternalRequest(SaveWeightsRequest):
    age_encryption_recipients: list[str] | None = None


class LoadWeightsRequest(msgspec.Struct):
    """With `session_id` and `model_seq_id` the load creates a model; with `model_id` and `seq_id` it loads into one."""

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
        check_metadata("user_metadata", self.user_metadata)


class LoadTarget(msgspec.Struct):
    """The fields of a LoadWeightsRequest by which the API routes it."""

    model_id: str | None = None
    seq_id: int | None = None


RESOLVED = ("source_tenant", "refused", "loaded_key")
"""Fields of a LoadWeightsCommand that only the server writes. The API removes them from the bodies of clients."""


class LoadWeightsCommand(msgspec.Struct):
    """A LoadWeightsRequest in the command log. The access token is replaced by `source_tenant`, the tenant of the token
    (None: the tenant of the model), or by `refused`, the reason why the token was refused. `loaded_key` is the
    checkpoint store's key of the loaded checkpoint; None before the load has ended."""

    path: str
    optimizer: bool = False
    source_tenant: str | None = None
    refused: str | None = None
    loaded_key: str | None = None


class CustomLossInput(msgspec.Struct):
    name: str
    rank: int


class CustomLossNode(msgspec.Struct):
    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(msgspec.Struct):
    nodes: list[CustomLossNode]
    format: int = 1


class CustomLossBody(msgspec.Struct):
    """What the server keeps of a custom loss."""

    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph


class CreateCustomLossRequest(CustomLossBody, kw_only=True):
    session_id: str
    custom_loss_seq_id: int


class CopyWeightsRequest(msgspec.Struct):
    """The copy becomes a new model: of the session `session_id`, as number `model_seq_id`, or of a new session in the
    project `destination_project_id`."""

    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class UploadStartRequest(msgspec.Struct):
    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


class UploadFinishRequest(msgspec.Struct):
    upload_id: str


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
    retrieved_request_ids: list[str] | None = None  # the type is checked; the ids are not used


class AssignProjectRequest(msgspec.Struct):
    project_id: str


class SearchOwner(msgspec.Struct):
    """Only the type `user` has `owner_urns`."""

    type: str = "own"
    owner_urns: list[str] | None = None


class SessionStatusQuery(msgspec.Struct):
    """Only the type `client_finished` has `reasons`."""

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


class CheckpointSearchCursor(msgspec.Struct):
    last_created_at: datetime
    last_checkpoint_uuid: str


class CheckpointSearchRequest(msgspec.Struct):
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_type: str | None = None
    owner: SearchOwner | None = None
    base_models: list[str] | None = None
    limit: int = 50
    cursor: CheckpointSearchCursor | None = None
