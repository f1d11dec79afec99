"""Thoughts of models that write their own `<think>`, and may do without: LFM2.5, MiMo-VL, SmolLM3, MiniCPM5.

The parsers of vLLM 0.32 for `<think>` take an answer that has no mark for thoughts. That is right where the prompt
opens them, and loses the answer of a model that chose not to think: its `content` is null. This parser goes by the
texts. An answer has thoughts if it begins with `<think>`, or if the prompt ends with it; all other text is content.

Where a grammar holds, such an answer has no thoughts unless the prompt opens them: the grammar begins at the first
token, because nobody knows beforehand whether the model will think.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser

START, END = "<think>", "</think>"
_TAIL = 16
"""Tokens at the end of a prompt in which the mark is looked for: it may be several, and white space follows it."""


class WrittenThoughts(ReasoningParser):
    """See the module. One for each answer; vLLM's engine core has instances of its own, which see token ids alone."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._opened = False
        """The prompt ends with the beginning of thoughts."""
        self._told = 0
        """Characters of thoughts in the events so far."""
        self._over: bool | None = None
        """Whether the answer's thoughts have ended, or it has none. None before the first event."""

    @property
    def reasoning_start_str(self) -> str:
        return START

    @property
    def reasoning_end_str(self) -> str:
        return END

    def adjust_request(self, request: Any) -> Any:
        if START in getattr(self.model_tokenizer, "all_special_tokens", ()):
            request.skip_special_tokens = False
        return request

    def opens(self, prompt: Sequence[int]) -> bool:
        """Whether thoughts are open at the end of a prompt (token ids), which is remembered."""
        self._opened = self._end_of(prompt).endswith(START)
        return self._opened

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether a prompt (token ids) ends with closed thoughts. Earlier answers in it may have some, too."""
        self.opens(input_ids)
        return self._end_of(input_ids).endswith(END)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        if self._over is not None:
            return self._over
        end = self.vocab.get(END)
        return end in delta_ids if end is not None else END in self._end_of(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        end = self.vocab.get(END)
        return input_ids[input_ids.index(end) + 1 :] if end in input_ids else input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        thoughts, content = self._split(model_output)
        if content is None and thoughts is None:
            return None, model_output
        return thoughts, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        thoughts, content = self._split(current_text)
        self._over = content is not None
        shown = _without_part_of_end(thoughts or "") if content is None else thoughts or ""
        new, self._told = shown[self._told :], max(self._told, len(shown))
        if not new and not content:
            return None
        return DeltaMessage(reasoning=new or None, content=content or None)

    def get_streaming_fallback_content(self, text: str, request: Any) -> str | None:
        """The text of a whole answer that ended before it was clear whether it has thoughts."""
        thoughts, content = self._split(text)
        return text if thoughts is None and content is None else None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        start, end = self.vocab.get(START), self.vocab.get(END)
        thoughts = list(token_ids[: token_ids.index(end)]) if end in token_ids else list(token_ids)
        if not self._opened and (start is None or start not in thoughts[:2]):
            return 0
        return len(thoughts) - thoughts.count(start) if start is not None else len(thoughts)

    def _split(self, text: str) -> tuple[str | None, str | None]:
        """The thoughts and the content of a text that may go on. Content is None while thoughts are open; both are None
        while it is not clear whether the text has thoughts."""
        body = text.lstrip()
        if body.startswith(START):
            body = body[len(START) :]
        elif not self._opened:
            return (None, None) if START.startswith(body) else (None, text)
        thoughts, mark, content = body.partition(END)
        return thoughts, content if mark else None

    def _end_of(self, ids: Sequence[int]) -> str:
        return self.model_tokenizer.decode(list(ids[-_TAIL:]), skip_special_tokens=False).rstrip()


def _without_part_of_end(text: str) -> str:
    """The text without what may be the first characters of the end mark."""
    for length in range(len(END) - 1, 0, -1):
        if text.endswith(END[:length]):
            return text[:-length]
    return text
