"""The documentation's compatibility page, made from the kept results of the matrix (`results.json`).

Equal results give an equal page. Runs nothing, but for `measured`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from skyrl.cli.demo.server import DemoServer
from tests.environments import ROOT
from tests.servers import ready, seeing_server

from .features import CATALOGUE
from .matrix import AT_ONCE, UNCALLED, UNTRIED_COMMANDS, run_version, versions
from .user import MODEL, SECOND_NAME

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
KEPT = Path(__file__).with_name("results.json")
STATUSES = {"ok": "", "refused": "refused: ", "broken": "SDK bug: "}
"""What stands before the releases in which a feature has this status."""
INTRODUCTION = """# Compatibility

Which feature works with which release of the `tinker` SDK: {releases}.
`make tables` writes this page from a run of `tests/e2e/sdk` on real servers: each feature is a check of outcomes, made
with the unmodified SDK of every release, and `tests/e2e/sdk/features` says what is checked. CI runs the checks with the
newest and the oldest release, and fails if this page says something else.

Each line begins with the releases with which the checks passed. **refused**: these have the feature, and it is refused
with a clear message. **SDK bug**: their own mistake keeps it from working, with any server. Other releases do not have
it.
"""

Results = Mapping[str, Mapping[str, Any]]
"""By release, newest first: what `Result.kept` has."""


def read() -> dict[str, dict[str, Any]]:
    return json.loads(KEPT.read_text())


def span(having: Sequence[str], results: Results) -> str:
    """Releases from oldest to newest, written as a range where they are consecutive."""
    known = list(results)[::-1]
    numbers = sorted(known.index(version) for version in having)
    if len(numbers) == len(known):
        return "all"
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{known[numbers[0]]} to {known[numbers[-1]]}"
    return ", ".join(known[number] for number in numbers)


def span_of(key: str, name: str, results: Results) -> str:
    return span([version for version, kept in results.items() if name in kept[key]], results)


def features(results: Results) -> str:
    """A list per group of the catalogue, with one line for features that work with the same releases. What is refused
    says why."""
    text = ""
    for group, members in groupby(CATALOGUE.values(), key=lambda feature: feature.group):
        alike: dict[str, list[str]] = {}
        for feature in members:
            found = {version: kept["features"].get(feature.name) for version, kept in results.items()}
            having = {status: [version for version in found if found[version] == status] for status in STATUSES}
            shown = [said + span(having[status], results) for status, said in STATUSES.items() if having[status]]
            why = f" ({_clause(feature.sentence)})" if having["refused"] else ""
            alike.setdefault("; ".join(shown), []).append(feature.name + why)
        text += f"\n## {group}\n\n" + "".join(f"- {shown}: {', '.join(names)}\n" for shown, names in alike.items())
    return text


def _clause(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:].rstrip(".")


def bugs(results: Results) -> str:
    found = sorted({bug for kept in results.values() for bug in kept["bugs"].items()})
    lines = (f"- {span_of('bugs', name, results)}: {name}: {said}\n" for name, said in found)
    return "\n## Bugs of an SDK\n\n" + "".join(lines)


def methods() -> str:
    """Which public methods and commands no check calls."""
    methods = ", ".join(f"`{name}` ({why})" for name, why in UNCALLED.items())
    commands = ", ".join(f"`{command}`, which {why}" for command, why in sorted(UNTRIED_COMMANDS.items()))
    return f"""
## Methods and endpoints

A check calls every public method of the clients of every release.
Not called: {methods}; {commands}.
No endpoint that an SDK asked for answered with 404, 405 or a server error, unless a check asked to be refused.
"""


def render(results: Results) -> str:
    introduction = INTRODUCTION.format(releases=", ".join(results))
    return introduction + features(results) + bugs(results) + methods()


def measured() -> None:
    """Keep the results of a new run of every release on two servers. Ends the program if a check fails."""
    with tempfile.TemporaryDirectory() as scratch:
        names = ("--served-model-name", SECOND_NAME, "--served-model-name", MODEL)
        with (
            ready(DemoServer(Path(scratch) / "server", *names)) as server,
            ready(seeing_server(Path(scratch) / "seeing", MODEL)) as seeing,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            places = [Path(scratch) / version for version in versions()]
            results = list(pool.map(lambda place: run_version(place.name, server.url, seeing.url, place), places))
    wrong = [f"{r.version}: {name}\n{said}" for r in results for name, said in r.failures.items()]
    wrong += [f"{r.version}: {surprise}" for r in results for surprise in r.surprises]
    if wrong:
        sys.exit("nothing kept, for there were failures:\n" + "\n".join(wrong))
    kept = {result.version: result.kept for result in results}
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
