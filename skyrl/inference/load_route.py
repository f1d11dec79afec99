"""vLLM's route that loads an adapter: what is sent, and which answers mean that the adapter is loaded.

Sends nothing: the engine and the forwarding client have HTTP clients of their own.
"""

from __future__ import annotations

PATH = "/v1/load_lora_adapter"


def load_request(name: str, directory: str) -> dict[str, str]:
    """The body, to be sent as JSON. `directory` is the adapter's as vLLM sees it."""
    return {"lora_name": name, "lora_path": directory}


def is_loaded(status: int, answer: bytes) -> bool:
    """Whether the adapter can be sampled from now. A name that is loaded already stands for the same weights: names are
    never used again."""
    return status == 200 or (status == 400 and b"already been loaded" in answer)
