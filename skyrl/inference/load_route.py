"""vLLM's route that loads an adapter: the body of a request, and the answers that mean that the adapter is loaded.

Sends no request: the engine and the forwarding client each have an HTTP client.
"""

from __future__ import annotations

PATH = "/v1/load_lora_adapter"


def load_request(name: str, directory: str) -> dict[str, str]:
    """The request body, to be sent as JSON. `directory` is the adapter's directory as vLLM sees it."""
    return {"lora_name": name, "lora_path": directory}


def is_loaded(status: int, answer: bytes) -> bool:
    """Whether the server has the adapter loaded now. If it has loaded the name before, it has the same weights: names
    are never reused."""
    return status == 200 or (status == 400 and b"already been loaded" in answer)
