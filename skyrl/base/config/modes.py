"""What a server does: whether it trains, forwards samples, and runs vLLM. `ServerConfig.modes` decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Modes:
    """`trains`: the server has an engine with a training backend. A gateway has none.

    `forwards`: API processes send samples to the inference server. Otherwise (`colocate_all`) trainer and vLLM share
    one device, samples are commands, and the engine runs them between two turns of training.

    `manages_inference`: this server starts vLLM itself, watches it and stops it.

    `shares_inference`: a gateway that samples from the vLLMs of the server that trains on the same database.
    """

    trains: bool
    forwards: bool
    manages_inference: bool
    shares_inference: bool = False

    @property
    def own_inference(self) -> bool:
        """Whether the vLLMs are skyrl's, of this server or of the one that trains."""
        return self.manages_inference or self.shares_inference
