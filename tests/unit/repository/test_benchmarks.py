"""The benchmarks' arithmetic, their checks of answers, and their reports. No process is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import calibration, null_upstream, prompts, series, soak
from benchmarks.checks import AnswerCheck
from benchmarks.table import Row, Target
from benchmarks.tenants import Spent, bound, compared, medians
from skyrl.base.wire.results import SampledSequence, SampleResult, encode_sample

ROOT = Path(__file__).parents[3]
ROUND = 20_011_275
"""The sum that a round of the calibration computes. If it changes, a round is other work, and figures in rounds cannot
be compared with earlier ones."""


def result_of(*token_lists: list[int]) -> bytes:
    sequences = [SampledSequence("length", tokens, [-0.5] * len(tokens)) for tokens in token_lists]
    return encode_sample(SampleResult(sequences))


def test_a_round_of_the_calibration_does_the_same_work_as_ever() -> None:
    assert calibration._one_round() == calibration._one_round() == ROUND


def test_slope_is_per_second_and_drift_is_a_share_of_the_level() -> None:
    times = [0.0, 10.0, 20.0, 30.0]
    assert series.slope(times, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.1)
    assert series.drift(times, [90.0, 100.0, 100.0, 110.0]) == pytest.approx(0.18)
    assert series.drift(times, [5.0] * 4) == pytest.approx(0, abs=1e-9)
    assert series.drift([1.0], [7.0]) == 0


def test_the_null_upstream_gives_the_answer_that_the_check_expects() -> None:
    tokens = prompts.prompt(77, 512)
    request = {"model": "tiny", "prompt": tokens, "n": 2, "max_tokens": 16}
    upstream = null_upstream.Upstream()
    body = upstream.answer(json.dumps(request).encode()).split(b"\r\n\r\n", 1)[1]
    check = AnswerCheck(sequences=2, max_tokens=16)
    assert len(tokens) == 512
    assert check.problem(prompts.variant(tokens[0]), body) is None
    assert check.problem(prompts.variant(tokens[0]) + 1, body) == "tokens of another request"


def test_every_variant_has_its_own_prompt_and_answer() -> None:
    assert [prompts.variant(prompts.prompt(index, 1)[0]) for index in range(prompts.VARIANTS)] == list(range(64))
    assert len({tuple(prompts.answer(index, 8)) for index in range(prompts.VARIANTS)}) == prompts.VARIANTS


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (result_of(prompts.answer(3, 8)), None),
        (result_of(prompts.answer(4, 8)), "tokens of another request"),
        (result_of(prompts.answer(3, 7)), "7 tokens"),
        (result_of(prompts.answer(3, 8), prompts.answer(3, 8)), "2 sequences"),
        (result_of([]), "0 tokens with 0 logprobs"),
        (result_of(prompts.answer(3, 8))[:-9], "undecodable (DecodeError)"),
        (b'{"error": "no server", "category": "server"}', "failed: no server"),
        (b'{"type": "sample"}', "undecodable (KeyError)"),
    ],
)
def test_the_check_names_what_is_wrong_with_an_answer(answer: bytes, problem: str | None) -> None:
    check = AnswerCheck(sequences=1, max_tokens=8)
    assert check.problem(3, answer) == problem
    assert check.problem(3, answer) == problem


def test_the_check_counts_logprobs() -> None:
    choice = {"token_ids": prompts.answer(3, 8), "logprobs": {"token_logprobs": [-1.0] * 7}}
    check = AnswerCheck(sequences=1, max_tokens=8)
    assert check.problem(3, json.dumps({"choices": [choice]}).encode()) == "8 tokens with 7 logprobs"


def test_a_bad_figure_errors_and_a_missing_figure_miss_the_target() -> None:
    assert Row("a", "a", "ms", 1.0, Target(1.2)).met
    assert not Row("a", "a", "ms", 1.3, Target(1.2)).met
    assert not Row("a", "a", "ms", 1.0, Target(1.2), errors=1).met
    assert not Row("a", "a", "ms", float("nan"), Target(1.2)).met
    assert not Row("a", "a", "/s", 1.0, Target(1.2, at_most=False)).met
    assert Row("a", "a", "/s", 1.0).met is None


def test_the_soak_reports_growing_memory_and_lost_requests() -> None:
    flat = {"samples_per_s": 500.0, "in_flight": 100, "p50_ms": 205.0, "p99_ms": 230.0, "rss_mb": 120.0, "cores": 0.2}
    flat |= {"disk_mb": 90.0, "open_files": 150, "threads": 8}
    totals = {"accepted": 900, "lost": 0, "read_again": 9, "differing": 0, "errors": {}}
    steady = [{"second": 10.0 * index, **flat} for index in range(30)]
    growing = [point | {"rss_mb": 120.0 + index} for index, point in enumerate(steady)]
    assert all(row.met for row in soak.verdicts(steady, totals))
    assert [row.what for row in soak.verdicts(growing, totals) if not row.met] == ["drift of RSS of the API, MB"]
    assert [row.what for row in soak.verdicts(steady, totals | {"lost": 1}) if not row.met] == ["lost, of 900 accepted"]


def test_the_bound_of_two_tenants_is_all_cpu_time_over_the_cores_or_the_busiest_thread() -> None:
    cpu = {"trainer": 3.0, "vllm": 4.0, "api": 0.5, "clients": 0.5}
    assert bound(Spent(9.0, cpu, {"trainer": 2.5, "vllm": 3.5}), 2) == 4.0
    assert bound(Spent(9.0, cpu, {"trainer": 2.5, "vllm": 3.5}), 4) == 3.5, "one thread is on one core"


def test_reached_share_and_speed_ups_of_two_tenants_are_ratios_to_the_bound() -> None:
    alone = [Spent(4.5, {"trainer": 2.0}, {"trainer": 2.0}), Spent(5.5, {"trainer": 2.0}, {"trainer": 2.0})]
    beside = Spent(5.0, {"trainer": 4.0, "vllm": 4.0}, {"trainer": 3.9, "vllm": 3.9})
    found = compared(alone, beside, 2)
    seconds = {"then_s": 10.0, "beside_s": 5.0, "bound_s": 4.0, "chain_s": 5.5}
    assert found == seconds | {"reached": 0.8, "speedup": 2.0, "best": 2.5}
    middle = medians([found, found | {"reached": 0.5, "speedup": 1.25}, found | {"reached": 1.0, "speedup": 2.5}])
    assert (middle["reached"], middle["speedup"]) == (0.8, 2.0), "the median of the rounds' ratios"


def test_every_program_is_called_and_every_program_that_a_page_names_exists() -> None:
    """By `make`, by `benchmarks/__main__.py` or a row of it, or with its command on a page."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    said = "\n".join(page.read_text() for page in pages if page.name != "CHANGELOG.md")
    files = {file.stem: file.read_text() for file in (ROOT / "benchmarks").glob("*.py")}
    rows = set(re.findall(r"\w+", files["__main__"].partition("STEPS")[0]))
    from_rows = "".join(files[name] for name in {"__main__", "stage", *rows} & set(files))
    called = said + (ROOT / "Makefile").read_text() + from_rows
    programs = {name for name, text in files.items() if '__name__ == "__main__"' in text} - {"__main__"}
    assert len(programs) > 5
    assert not {name for name in programs if not re.search(rf"-m benchmarks\.{name}\b|\"benchmarks\.{name}\"", called)}
    named = set(re.findall(r"\bbenchmarks(?:\.|/)(\w+)(?:\.py)?\b(?!/)", said)) - {"results", "README"}
    assert named <= set(files), "a page names a program that is gone"
