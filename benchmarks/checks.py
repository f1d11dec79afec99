"""Whether an answer is a whole result of the request that was sent, at the price of a set lookup."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from benchmarks import prompts
from skyrl.wire import tinker_pb2 as pb

REMEMBERED = 100_000


class AnswerCheck:
    """Answers that were found good once are recognised by their bytes; every other one is decoded and compared."""

    def __init__(self, sequences: int, max_tokens: int, exact: bool) -> None:
        """`exact`: the null upstream generated it, so the tokens are known; else only that there are some."""
        self._sequences, self._max_tokens, self._exact = sequences, max_tokens, exact
        self._good: set[tuple[int, bytes]] = set()

    def problem(self, variant: int, answer: bytes) -> str | None:
        """What is wrong with an answer to a prompt of this variant, in a few words; None when it is whole."""
        if (variant, answer) in self._good:
            return None
        try:
            found = _decoded(answer)
        except (DecodeError, ValueError, KeyError, TypeError) as error:
            return f"undecodable ({type(error).__name__})"
        if isinstance(found, str):
            return found
        wrong = self._wrong(variant, found)
        if wrong is None and len(self._good) < REMEMBERED:
            self._good.add((variant, answer))
        return wrong

    def _wrong(self, variant: int, sequences: list[tuple[list[int], int]]) -> str | None:
        if len(sequences) != self._sequences:
            return f"{len(sequences)} sequences"
        expected = prompts.answer(variant, self._max_tokens)
        for tokens, logprobs in sequences:
            if len(tokens) != logprobs or not tokens:
                return f"{len(tokens)} tokens with {logprobs} logprobs"
            if self._exact and tokens != expected:
                return "tokens of another request" if len(tokens) == self._max_tokens else f"{len(tokens)} tokens"
        return None


def _decoded(answer: bytes) -> list[tuple[list[int], int]] | str:
    """Tokens and number of logprobs of each sequence, of a completion, a protobuf or a JSON result; or its error."""
    if not answer.startswith(b"{"):
        response = pb.SampleResponse.FromString(answer)
        return [(np.frombuffer(s.tokens, np.int32).tolist(), len(s.logprobs) // 4) for s in response.sequences]
    body: dict[str, Any] = json.loads(answer)
    if "error" in body:
        return f"failed: {str(body['error'])[:80]}"
    if "choices" in body:
        return [(choice["token_ids"], len(choice["logprobs"]["token_logprobs"])) for choice in body["choices"]]
    return [(sequence["tokens"], len(sequence["logprobs"])) for sequence in body["sequences"]]
