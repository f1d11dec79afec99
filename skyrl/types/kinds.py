"""What a request is, and where it runs."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """EXTERNAL samples are forwarded by the API process; everything else is a command for the engine."""

    CREATE_MODEL = "CREATE_MODEL"
    FORWARD = "FORWARD"
    FORWARD_BACKWARD = "FORWARD_BACKWARD"
    OPTIM_STEP = "OPTIM_STEP"
    SAVE_WEIGHTS = "SAVE_WEIGHTS"
    SAVE_WEIGHTS_FOR_SAMPLER = "SAVE_WEIGHTS_FOR_SAMPLER"
    SAVE_WEIGHTS_EXTERNAL = "SAVE_WEIGHTS_EXTERNAL"
    LOAD_WEIGHTS = "LOAD_WEIGHTS"
    UNLOAD_MODEL = "UNLOAD_MODEL"
    SAMPLE = "SAMPLE"
    EXTERNAL = "EXTERNAL"


PASSES = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})
"""Kinds the engine may run together; all others are barriers in their model's order."""

SAVES = frozenset({Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL})
"""Barriers that only read their model."""

FILE_COMMANDS = SAVES | {Kind.LOAD_WEIGHTS}
"""Barriers that wait for files most of the time, so that other models may train meanwhile."""

SAMPLES = frozenset({Kind.SAMPLE, Kind.EXTERNAL})

ENGINE_KINDS = frozenset(Kind) - {Kind.EXTERNAL}
