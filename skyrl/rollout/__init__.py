"""The client that samples for an RL framework, from a rollout plane or any inference server.

Public: trainers import it. Knows HTTP and the answers of SGLang and vLLM, and no other door.
"""

from skyrl.rollout.client import RetrievedText, RolloutClient
from skyrl.rollout.config import RolloutConfig
from skyrl.rollout.engines import EngineHooks, SglangHooks, VllmHooks, engine_hooks
from skyrl.rollout.errors import BadAnswer, EngineError, Interrupted, RequestRefused, RolloutError, RolloutTimeout
from skyrl.rollout.messages import RolloutAnswer, RolloutRequest, SamplingParams
from skyrl.rollout.strategies import PlainStrategy, RadixStrategy, Strategy, Trajectory, make_strategy

__all__ = [
    "BadAnswer",
    "EngineError",
    "EngineHooks",
    "Interrupted",
    "PlainStrategy",
    "RadixStrategy",
    "RequestRefused",
    "RetrievedText",
    "RolloutAnswer",
    "RolloutClient",
    "RolloutConfig",
    "RolloutError",
    "RolloutRequest",
    "RolloutTimeout",
    "SamplingParams",
    "SglangHooks",
    "Strategy",
    "Trajectory",
    "VllmHooks",
    "engine_hooks",
    "make_strategy",
]
