"""Writes the figures of a GPU run into docs/gpu.md.

Usage: python -m tests.gpu.table FIGURES.jsonl [--page docs/gpu.md]

FIGURES.jsonl is what the tests wrote to $SKYRL_TEST_FIGURES, perhaps of a run that was cut off. The section between
the two marks of the page becomes a sentence about the run and one row for each thing that was measured. The section of
a rehearsal on a CPU is printed, and written only to a page that is named.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.figures import REHEARSAL, said

BEGIN, END = "<!-- figures of make test-gpu: begin -->", "<!-- figures of make test-gpu: end -->"
COLUMNS = ("alone", "merged", "beside")
PAGE = Path("docs/gpu.md")
HEAD = "| | alone | merged | beside: PEFT, transformers |"


class NotAFile(ValueError):
    """The file has no line that says where the tests ran, or the page lacks the marks."""


def section(lines: Sequence[dict[str, Any]]) -> str:
    """The sentence and the table of a run."""
    run = next((line for line in lines if "where" in line), None)
    if run is None:
        raise NotAFile("no line names the machine: is this a file of $SKYRL_TEST_FIGURES?")
    tests = [line for line in lines if "test" in line]
    outcomes = Counter(line["outcome"] for line in tests)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    software = f"torch {run['torch']}, CUDA {run['cuda']}, Python {run['python']}"
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        if "what" in line:
            rows.setdefault(line["what"], {})[line["column"]] = said(line["value"])
    table = [HEAD, "|---|---|---|---|"]
    for what, values in rows.items():
        table.append(f"| {' | '.join([what, *(values.get(column, '') for column in COLUMNS)])} |")
    failed = [f"`{line['test']}`" for line in tests if line["outcome"] == "failed"]
    minutes = lines[-1]["at_s"] / 60
    about = [f"`make test-gpu` on {run['where']}, {run['day']}: {software}, {minutes:.0f} minutes, {counted}."]
    about += [f"With `{run['settings']}`."] if run.get("settings") else []
    about += [f"Failed: {', '.join(failed)}."] if failed else []
    return "\n\n".join([*about, "\n".join(table)])


def with_section(page: str, made: str) -> str:
    """The page with another section between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise NotAFile(f"the page must have {BEGIN} and {END} once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The records of a file. A last line without an end is left out: the run was cut off there."""
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", type=Path)
    parser.add_argument("--page", type=Path, help=f"default: {PAGE}")
    options = parser.parse_args(arguments)
    try:
        with options.figures.open() as file:
            lines = read(file)
        made = section(lines)
        if options.page is None and any(line.get("where") == REHEARSAL for line in lines):
            print(made)
            return
        page = options.page or PAGE
        page.write_text(with_section(page.read_text(), made))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"written: {page}")


if __name__ == "__main__":
    main()
