"""Anthropic's Messages: requests as chat completions, answers and streams as Anthropic's clients read them."""

from skyrl.server.dialects.messages.errors import AnthropicError, error_body
from skyrl.server.dialects.messages.fields import MessagesRequest
from skyrl.server.dialects.messages.request import to_chat, to_count

__all__ = ["AnthropicError", "MessagesRequest", "error_body", "to_chat", "to_count"]
