"""Reads the prompt's part of a vLLM answer: logprobs, best tokens, and the rows that skyrl's plugin has appended.

Knows the rows of `prompt_logprobs`. Does not know the rest of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from skyrl.base.wire.results import Alternatives, TopkRow
from skyrl.base.wire.tensors import WireTensor
from skyrl.inference.vllm_plugin.extra_args import PromptScores
from skyrl.server.sampling.job import SampleJob


class MalformedAnswer(Exception):
    """A 2xx answer that is no completion, or an incomplete one."""


class PromptCell(msgspec.Struct, gc=False):
    logprob: float


PromptRow = dict[str, PromptCell] | None
_row_decoder: msgspec.json.Decoder[PromptRow] = msgspec.json.Decoder(PromptRow)


def prompt_scores(job: SampleJob) -> PromptScores | None:
    """The scores that the job needs from the plugin in vLLM; None if it needs none."""
    if job.target is None and not job.alternatives:
        return None
    rows = ids = np.zeros(0, np.int32)
    if job.target is not None:
        named = job.target.values >= 0
        rows, ids = job.target.row_of_value()[named].astype(np.int32), job.target.values[named].astype(np.int32)
    return PromptScores(rows, ids, job.alternatives, job.seed if job.alternatives else None)


def best_first(cells: Iterable[tuple[int, float]]) -> TopkRow:
    return sorted(cells, key=lambda cell: -cell[1])


class PromptAnswer:
    """The prompt rows of one choice (all choices have the same rows), read for one job. A part that the job does not
    want is None. Raises MalformedAnswer or msgspec.DecodeError if a part that the job wants is missing."""

    def __init__(self, rows: list[msgspec.Raw] | None, job: SampleJob) -> None:
        self._job = job
        self._appended: list[tuple[int, float]] = []
        self.logprobs: list[float | None] | None = None
        """One value per prompt token."""
        self.topk: list[TopkRow | None] | None = None
        """The k best tokens per position. vLLM also sends the token of the prompt; it is dropped unless it is one of
        them."""
        if not job.wants_prompt:
            return
        scores = prompt_scores(job)
        own, appended = len(job.prompt), 0 if scores is None else scores.appended(len(job.prompt))
        if rows is None or len(rows) != own + appended:
            more = f" and {appended} of the plugin" if appended else ""
            raise MalformedAnswer(f"{len(rows or [])} rows of prompt logprobs for {own} tokens{more}")
        self._read_own(rows[:own])
        self._appended = [_only_cell(_row_decoder.decode(row)) for row in rows[own:]]

    def _read_own(self, rows: list[msgspec.Raw]) -> None:
        """Decodes one row at a time, so that memory holds the objects of one row only."""
        job, first, prompt = self._job, self._first_wanted(), self._job.prompt[:]
        logprobs: list[float | None] = []
        topk: list[TopkRow | None] = []
        for index, raw in enumerate(rows):
            row = _row_decoder.decode(raw) if index >= first else None
            if job.prompt_logprobs:
                logprobs.append(None if index < first else _own_logprob(row, index, prompt[index]))
            if job.topk_prompt:
                cells = None if row is None else ((int(token), cell.logprob) for token, cell in row.items())
                topk.append(None if cells is None else best_first(cells)[: job.topk_prompt])
        self.logprobs = logprobs if job.prompt_logprobs else None
        self.topk = topk if job.topk_prompt else None

    def target_logprobs(self) -> WireTensor | None:
        """float32 in the layout of the target; 0.0 for cells without an id."""
        target = self._job.target
        if target is None:
            return None
        named = target.values >= 0
        cells = self._appended[: int(named.sum())]
        if [token for token, _ in cells] != target.values[named].tolist():
            raise MalformedAnswer("logprobs of other tokens than were asked for")
        values = np.zeros(len(target.values), np.float32)
        values[named] = [logprob for _, logprob in cells]
        return target.with_values(values)

    def alternatives(self) -> Alternatives | None:
        job = self._job
        if not job.alternatives:
            return None
        shape = (len(job.prompt) - 1, job.alternatives)
        drawn = self._appended[len(self._appended) - shape[0] * shape[1] :]
        return Alternatives(
            np.asarray([token for token, _ in drawn], np.int64).reshape(shape),
            np.asarray([logprob for _, logprob in drawn], np.float32).reshape(shape),
        )

    def _first_wanted(self) -> int:
        """The first prompt position whose logprobs the client wants; position 0 has none."""
        last_n = self._job.prompt_logprobs_last_n
        return 1 if last_n is None else max(1, len(self._job.prompt) - last_n)


def _own_logprob(row: PromptRow, index: int, token: int) -> float:
    cell = (row or {}).get(str(token))
    if cell is None:
        raise MalformedAnswer(f"no logprob for prompt token {index}")
    return cell.logprob


def _only_cell(row: PromptRow) -> tuple[int, float]:
    """The token and logprob of a row that the plugin appended."""
    if row is None or len(row) != 1:
        raise MalformedAnswer("a row appended to the prompt logprobs does not hold one token")
    ((token, cell),) = row.items()
    return int(token), cell.logprob
