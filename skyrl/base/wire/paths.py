"""tinker:// paths and the names inside them: `tinker://<model_id>/<kind>/<name>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from skyrl.base.wire.errors import RequestError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[CheckpointKind, ...] = ("weights", "sampler_weights", "external_weights")
_NAME = re.compile(r"[A-Za-z0-9_\-.]{1,255}")


@dataclass(frozen=True)
class TinkerPath:
    """A checkpoint's address."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def check_name(name: str, field: str = "path") -> str:
    """A checkpoint name that is safe as a file name and in a URL. Raises RequestError naming `field`."""
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise RequestError(
            f"{name!r} is not a checkpoint name; allowed are 1 to 255 of letters, digits, '_', '-' and '.'",
            field=field,
        )
    return name


def parse_path(text: str, field: str = "path") -> TinkerPath:
    """Raises RequestError naming `field` when `text` is not tinker://<model_id>/<kind>/<name>."""
    parts = text.removeprefix("tinker://").split("/")
    if not text.startswith("tinker://") or len(parts) != 3 or not parts[0] or parts[1] not in KINDS:
        raise RequestError(
            f"{text!r} is not a checkpoint path; expected tinker://<model_id>/<{'|'.join(KINDS)}>/<name>",
            field=field,
        )
    return TinkerPath(parts[0], cast(CheckpointKind, parts[1]), check_name(parts[2], field))


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The SDK computes the same id from these two values."""
    return f"{session_id}:train:{model_seq_id}"


def custom_loss_id_of(session_id: str, seq_id: int) -> str:
    return f"{session_id}:loss:{seq_id}"


def sampling_session_id_of(session_id: str, seq_id: int) -> str:
    return f"{session_id}:sample:{seq_id}"
