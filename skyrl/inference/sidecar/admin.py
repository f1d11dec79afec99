"""Which paths need the admin key: all that change weights, pause, or free memory; here and in vLLM.

vLLM's own development routes pass through the sidecar, and more of them come with each version. So the list names what
is open, and everything else needs the key.
"""

from __future__ import annotations

from collections.abc import Collection

_V1 = "/v1/"
_ADAPTERS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_OPEN_AT_VLLM = frozenset(
    {
        *("/classify", "/cohere/v2/chat", "/detokenize", "/embed", "/generative_scoring", "/get_world_size"),
        *("/inference/v1/generate", "/invocations", "/is_paused", "/is_sleeping", "/load", "/ping"),
        *("/pooling", "/rerank", "/score", "/tokenize", "/tokenizer_info"),
        *("/v2/embed", "/v2/rerank", "/version", "/weight_info"),
    }
)


def needs_admin(path: str, open_here: Collection[str]) -> bool:
    """`open_here`: the sidecar's own paths that every client may use."""
    if path in open_here or path in _OPEN_AT_VLLM:
        return False
    return not path.startswith(_V1) or path in _ADAPTERS
