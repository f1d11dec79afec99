"""Checks that an answer is a complete result of its request. A repeated answer costs one set lookup."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from benchmarks import prompts
from skyrl.base.wire import tinker_pb2 as pb

REMEMBERED = 100_000


class AnswerCheck:
    """Decodes and compares each new answer. Bytes that were good once are recognised and not decoded again."""

    def __init__(self, sequences: int, max_tokens: int) -> None:
        self._sequences, self._max_tokens = sequences, max_tokens
        self._good: set[tuple[int, bytes]] = set()

    def problem(self, variant: int, answer: bytes) -> str | None:
        """The fault of an answer to a prompt of this variant, in a few words; None if the answer is complete."""
        if (variant, answer) in self._good:
            return None
        try:
            sequences = _decoded(answer)
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            return f"undecodable ({type(error).__name__})"
        if isinstance(sequences, str):
            return sequences
        problem = self._compare(variant, sequences)
        if problem is None and len(self._good) < REMEMBERED:
            self._good.add((variant, answer))
        return problem

    def _compare(self, variant: int, sequences: list[tuple[list[int], int]]) -> str | None:
        if len(sequences) != self._sequences:
            return f"{len(sequences)} sequences"
        expected = prompts.answer(variant, self._max_tokens)
        for tokens, logprobs in sequences:
            if len(tokens) != logprobs or not tokens:
                return f"{len(tokens)} tokens with {logprobs} logprobs"
            if tokens != expected:
                return "tokens of another request" if len(tokens) == self._max_tokens else f"{len(tokens)} tokens"
        return None


def _decoded(answer: bytes) -> list[tuple[list[int], int]] | str:
    """Tokens and number of logprobs of each sequence in a completion or a protobuf result. For a failure the error."""
    if not answer.startswith(b"{"):
        response = pb.SampleResponse.FromString(answer)
        return [(np.frombuffer(s.tokens, np.int32).tolist(), len(s.logprobs) // 4) for s in response.sequences]
    body: dict[str, Any] = json.loads(answer)
    if "error" in body:
        return f"failed: {str(body['error'])[:80]}"
    return [(choice["token_ids"], len(choice["logprobs"]["token_logprobs"])) for choice in body["choices"]]
