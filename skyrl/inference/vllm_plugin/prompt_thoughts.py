"""Whether thoughts are open when an answer begins, from the answer's prompt.

Some parsers of vLLM 0.32 look for the last mark of thoughts in the whole prompt. Where a template does not open
thoughts itself (Kimi-K2-Thinking, MiniMax-M3), that is the mark of an earlier answer or of the system message: the
thoughts of a stream were then content. Here only the marks behind the last special token count, which ends or begins a
message.

The parser `written_thoughts` also gets the prompt of an answer that is not streamed, and says where a grammar begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import DelegatingParser


def read_prompts() -> None:
    """Patch this process, which is vLLM's API server. A second call changes nothing."""
    ends, resolve = DelegatingParser.is_reasoning_end, ChatCompletionRequest.resolve_reasoning_ended
    if ends.__module__ == __name__:
        return

    def is_reasoning_end(self: Any, input_ids: list[int]) -> bool:
        return ends(self, input_ids) and ends(self, _last_message(self, input_ids))

    def set_prompt_token_ids(self: Any, prompt_token_ids: Sequence[int]) -> None:
        if (opens := getattr(self.reasoning_parser, "opens", None)) is not None:
            opens(prompt_token_ids)

    def resolve_reasoning_ended(self: Any, parser: Any, prompt_token_ids: list[int]) -> bool | None:
        opens = None if parser is None else getattr(parser.reasoning_parser, "opens", None)
        if opens is None or not self.include_reasoning:
            return resolve(self, parser, prompt_token_ids)
        return not opens(prompt_token_ids)

    DelegatingParser.is_reasoning_end = is_reasoning_end
    DelegatingParser.set_prompt_token_ids = set_prompt_token_ids
    ChatCompletionRequest.resolve_reasoning_ended = resolve_reasoning_ended


def _last_message(parser: Any, prompt: list[int]) -> list[int]:
    """The tokens behind the last special one that is no mark of thoughts."""
    thoughts, vocabulary = parser.reasoning_parser, parser.model_tokenizer.get_vocab()
    marks = {vocabulary.get(mark) for mark in (thoughts.reasoning_start_str, thoughts.reasoning_end_str)}
    borders = _special_ids(parser.model_tokenizer) - marks
    begin = next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in borders), 0)
    return prompt[begin:]


@lru_cache(maxsize=4)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids).union(number for number, token in added.items() if token.special)
