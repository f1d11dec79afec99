"""The header of a completion request that wants token ids and logprobs alone (see `tokens_only`).

The client and the plugin use this module; it imports neither vLLM nor torch.
"""

from __future__ import annotations

TOKENS_ONLY = "x-skyrl-tokens-only"
