"""OpenAI's Responses: requests as chat completions, answers and streams as OpenAI's clients read them."""

from skyrl.server.dialects.responses.fields import ResponsesRequest
from skyrl.server.dialects.responses.request import previous_response_id, to_chat

__all__ = ["ResponsesRequest", "previous_response_id", "to_chat"]
