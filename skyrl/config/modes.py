"""What a server does, as its configuration decides: it trains, it forwards samples, it manages vLLM.

Knows names and truth values only. `ServerConfig.modes` makes the one value that every other module asks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Modes:
    """`trains`: there is an engine with a training backend; a gateway has none.

    `forwards`: API processes send samples to the inference server. If not (`colocate_all`), trainer and sampler share
    one device: samples are commands, and the engine runs them between two turns of training.

    `manages_inference`: this server starts vLLM itself, watches it and stops it.
    """

    trains: bool
    forwards: bool
    manages_inference: bool
