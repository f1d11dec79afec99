"""The prompt's part of an answer of the inference server: logprobs, best tokens, and what skyrl's plugin has appended.

There are two forms of it. vLLM with the plugin sends `prompt_cells`, two arrays; every other server sends
`prompt_logprobs`, a map from token to logprob for each row. Both give the same values. Does not know the sampled
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from skyrl.base.wire.results import Alternatives, TopkRow, TopkTable
from skyrl.base.wire.tensors import WireTensor
from skyrl.inference.vllm_plugin.protocol import PromptScores, unpack_cells
from skyrl.sampling.job import SampleJob


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


class PromptAnswer:
    """The prompt's part of one choice (all choices have the same), read for one job that wants it. What the job does
    not want is None. Raises MalformedAnswer or msgspec.DecodeError if a part that the job wants is missing."""

    def __init__(self, rows: list[msgspec.Raw] | None, cells: bytes | None, job: SampleJob) -> None:
        self._job = job
        self.logprobs: Sequence[float | None] | npt.NDArray[np.float32] | None = None
        """One value per prompt token; None or NaN where there is none."""
        self.topk: list[TopkRow | None] | TopkTable | None = None
        """Per position the k best tokens, in rows also that of the prompt, which vLLM sends, too, in any order."""
        scores = prompt_scores(job)
        appended = 0 if scores is None else scores.appended(len(job.prompt))
        if cells is None:
            self._ids, self._values = self._read_rows(rows, appended)
        else:
            self._ids, self._values = self._read_cells(cells, appended)

    def _read_rows(
        self, rows: list[msgspec.Raw] | None, appended: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        own = len(self._job.prompt)
        if rows is None or len(rows) != own + appended:
            more = f" and {appended} of the plugin" if appended else ""
            raise MalformedAnswer(f"{len(rows or [])} rows of prompt logprobs for {own} tokens{more}")
        self._read_own(rows[:own])
        only = [_only_cell(_row_decoder.decode(row)) for row in rows[own:]]
        ids, values = [token for token, _ in only], [logprob for _, logprob in only]
        return np.asarray(ids, np.int64), np.asarray(values, np.float32)

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
                topk.append(None if row is None else [(int(token), cell.logprob) for token, cell in row.items()])
        self.logprobs = logprobs if job.prompt_logprobs else None
        self.topk = topk if job.topk_prompt else None

    def _read_cells(self, cells: bytes, appended: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        job, first, prompt = self._job, self._first_wanted(), np.asarray(self._job.prompt[:], np.int32)
        rows, columns = len(prompt) - 1, 1 + job.topk_prompt
        ids, values = unpack_cells(cells)
        if len(ids) != rows * columns + appended:
            raise MalformedAnswer(f"{len(ids)} cells of prompt logprobs for {rows} x {columns} and {appended}")
        if np.isnan(values).any():
            raise MalformedAnswer("a prompt logprob was not computed")
        own_ids = ids[: rows * columns].reshape(rows, columns)
        own = values[: rows * columns].reshape(rows, columns)
        if (own_ids[:, 0] != prompt[1:]).any():
            raise MalformedAnswer("prompt logprobs of other tokens than were asked for")
        if job.prompt_logprobs:
            self.logprobs = np.full(len(prompt), np.nan, np.float32)
            self.logprobs[first:] = own[first - 1 :, 0]
        if job.topk_prompt:
            self.topk = TopkTable.empty(len(prompt), job.topk_prompt)
            self.topk.put(first, own_ids[first - 1 :], own[first - 1 :])
        return ids[rows * columns :], values[rows * columns :]

    def target_logprobs(self) -> WireTensor | None:
        """float32 in the layout of the target; 0.0 for cells without an id."""
        target = self._job.target
        if target is None:
            return None
        named = target.values >= 0
        number = int(named.sum())
        if not np.array_equal(self._ids[:number], target.values[named]):
            raise MalformedAnswer("logprobs of other tokens than were asked for")
        values = np.zeros(len(target.values), np.float32)
        values[named] = self._values[:number]
        return target.with_values(values)

    def alternatives(self) -> Alternatives | None:
        job = self._job
        if not job.alternatives:
            return None
        shape = (len(job.prompt) - 1, job.alternatives)
        start = len(self._ids) - shape[0] * shape[1]
        return Alternatives(self._ids[start:].astype(np.int64).reshape(shape), self._values[start:].reshape(shape))

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
