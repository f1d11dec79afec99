"""The kinds of requests, and which process runs each kind."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """An API process forwards EXTERNAL samples. The engine runs all other kinds."""

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
"""Kinds that the engine may run together. All other commands of a model are barriers."""

SAVES = frozenset({Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.SAVE_WEIGHTS_EXTERNAL})
"""Barriers that do not change their model."""

FILE_COMMANDS = SAVES | {Kind.LOAD_WEIGHTS}
"""Barriers that wait for files most of the time. Other models train meanwhile."""

SAMPLES = frozenset({Kind.SAMPLE, Kind.EXTERNAL})

ENGINE_KINDS = frozenset(Kind) - {Kind.EXTERNAL}
