"""What the engine does now, as it tells the API processes every few seconds: for each model with commands, what its
next command waits for. Holds no rules; `skyrl.engine.activity` fills it, and `skyrl.api.request_status`
puts it into words.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class WaitsFor(StrEnum):
    """What a model's next command waits for."""

    NOTHING = "nothing"
    """The command runs."""
    TURN = "turn"
    """Commands of other models, or the free place for a save or load."""
    GAP = "gap"
    """A command with a lower number, which has not arrived: the client has not sent it, or it is on its way."""
    QUOTA = "quota"
    """Tokens of its tenant's quota."""
    RECOVERY = "recovery"
    """The engine has restarted and has not restored the model yet."""
    STORE = "store"
    """The checkpoint store: the model cannot be restored without a checkpoint that it has loaded."""
    MEMORY = "memory"
    """Memory to restore the model."""
    FILES = "files"
    """Files that cannot be read or written now: the disk is full or answers with errors, or this user may not."""
    SETTINGS = "settings"
    """Another start of the server: with its settings of now the model cannot be restored."""


class ModelActivity(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model with commands. Times are in seconds since the epoch."""

    tenant: str
    waits_for: WaitsFor
    since: float
    """Since when it waits for that or, if it runs, since when it runs. Known to a few seconds."""
    kind: str
    """The kind of the command that runs, or that is next."""
    seq_id: int | None
    """The number of that command, None for an unload; for GAP the missing number. With several merged passes, the
    highest that runs."""
    waiting: int
    """How many commands wait. A running command does not count."""
    work_s: float | None = None
    """The estimated run time of all its commands; None while the engine has not run all their kinds."""
    starts_at: float | None = None
    """For QUOTA: when the command may start."""


class RecoveryProgress(msgspec.Struct, frozen=True):
    """`repeated` of `commands` commands have been repeated since the engine has restarted."""

    repeated: int
    commands: int


class EngineActivity(msgspec.Struct, frozen=True, omit_defaults=True):
    """By model id, the models with commands: at most MAX_MODELS, the longest waiting first."""

    models: dict[str, ModelActivity] = {}
    recovery: RecoveryProgress | None = None
    """Set while the engine restores models after a restart."""
    samples_waiting: int = 0
    """Samples that wait for the engine. Only where trainer and sampler share a device."""
    inference_away_since: float | None = None
    """Since when no inference server is ready, in seconds since the epoch."""
    run_s: dict[str, float] = {}
    """By kind, the mean seconds that a command runs."""


MAX_MODELS = 2_000

_decoder = msgspec.json.Decoder(EngineActivity)


def encode_activity(activity: EngineActivity) -> str:
    return msgspec.json.encode(activity).decode()


def decode_activity(text: str | None) -> EngineActivity:
    """The activity in the text; an empty one for None, and for a text of another version of skyrl."""
    if text is None:
        return EngineActivity()
    try:
        return _decoder.decode(text)
    except msgspec.MsgspecError:
        return EngineActivity()
