"""vLLM's route that loads an adapter: the body of a request, and the meaning of the answers.

Sends no request: the engine and the forwarding client each have an HTTP client.
"""

from __future__ import annotations

from skyrl.inference.remote.references import NOT_STORED, STORE_AWAY

PATH = "/v1/load_lora_adapter"


def load_request(name: str, directory: str) -> dict[str, str]:
    """The request body, to be sent as JSON. `directory` is the adapter's directory as vLLM sees it, or a reference
    to the checkpoint store (`skyrl.inference.remote`)."""
    return {"lora_name": name, "lora_path": directory}


def is_loaded(status: int, answer: bytes) -> bool:
    """Whether the server has the adapter loaded now. If it has loaded the name before, it has the same weights: names
    are never reused."""
    return status == 200 or (status == 400 and b"already been loaded" in answer)


def is_missing(status: int, answer: bytes) -> bool:
    """Whether the checkpoint store does not have the adapter to which a request referred."""
    return status == 404 and NOT_STORED.encode() in answer


def is_to_repeat(status: int, answer: bytes) -> bool:
    """Whether the load may succeed later: the replica's node cannot read the checkpoint store now, or the router in
    front of the replicas got no answer from one of them."""
    return status in (502, 504) or (status == 503 and STORE_AWAY.encode() in answer)
