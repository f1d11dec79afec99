"""The versions of vLLM that the plugin was tested with, and a variable that the plugin reads. Imports nothing, so that
reading them is cheap."""

from __future__ import annotations

TESTED_VERSIONS = ("0.32.",)

TELL_VERSIONS_VARIABLE = "SKYRL_VLLM_TELL_VERSIONS"
"""Environment variable; "1": chats, and the first event of each choice of a stream, tell the weights' version too."""
