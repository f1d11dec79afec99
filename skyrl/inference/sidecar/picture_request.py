"""vLLM's route for token ids and pictures, in the words of `/v1/completions`.

Requests and answers of both routes have the same facts in other places. Knows no connection.
"""

from __future__ import annotations

from typing import Any

from skyrl.inference.sidecar.errors import VllmBroke
from skyrl.inference.sidecar.pictures import PlacedPictures

PATH = "/inference/v1/generate"
_SAME = ("model", "priority", "cache_salt", "stream", "stream_options", "return_token_ids")
"""Fields that are no sampling parameters."""
_OTHER = ("prompt", "session_id", "return_tokens_as_token_ids")
"""Fields of completions that this route does not have."""


def generate_body(body: dict[str, Any], pictures: PlacedPictures) -> dict[str, Any]:
    """The request for a prompt with pictures, made of the request for a completion."""
    return {
        **{name: body[name] for name in _SAME if name in body},
        "token_ids": pictures.tokens,
        "content_parts": pictures.parts,
        "output_mode": "text",
        "sampling_params": {name: value for name, value in body.items() if name not in (*_SAME, *_OTHER)},
    }


def as_completion(answer: Any, prompt: list[int], *, chunk: bool) -> Any:
    """The answer, or a chunk of its stream, as a completion has it. `prompt`: what vLLM must have computed. Raises
    VllmBroke."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        return answer
    computed = answer.get("prompt_token_ids")
    if computed != prompt and not (chunk and computed is None):
        count = len(computed) if isinstance(computed, list) else None
        raise VllmBroke(f"vLLM made a prompt of {count} tokens, and {len(prompt)} were counted here, or other tokens")
    try:
        choices = [_choice(one) | {"prompt_logprobs": answer.get("prompt_logprobs")} for one in answer["choices"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise VllmBroke(f"vLLM's answer has other logprobs than tokens: {error}") from error
    return answer | {"choices": choices}


def _choice(given: dict[str, Any]) -> dict[str, Any]:
    content = (given.get("logprobs") or {}).get("content")
    if content is None:
        return given | {"logprobs": None}
    values = [one["logprob"] for one in content]
    rows = [{f"token_id:{token}": value} for token, value in zip(given["token_ids"], values, strict=True)]
    return given | {"logprobs": {"token_logprobs": values, "top_logprobs": rows}}
