"""Names of parsers that vLLM loads from this plugin, when a server has one of them."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

_HERE = "skyrl.inference.vllm_plugin"


def add_parsers() -> None:
    """In this process; each of vLLM's processes looks names up by itself."""
    ReasoningParserManager.register_lazy_module(
        "skyrl_written_thoughts", f"{_HERE}.written_thoughts", "WrittenThoughts"
    )
    ToolParserManager.register_lazy_module("skyrl_bare_json", f"{_HERE}.bare_json", "BareJsonToolParser")
    ToolParserManager.register_lazy_module("skyrl_one_llama_call", f"{_HERE}.one_call", "OneLlamaCall")
    ToolParserManager.register_lazy_module("mistral", f"{_HERE}.mistral_calls", "MistralToolParser")
