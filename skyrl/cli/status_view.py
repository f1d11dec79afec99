"""Draws the server's answers about runs for a terminal. Names come from clients: they are never read as markup, and
control characters in them are replaced."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from skyrl.server.request_status.status import duration

LAST_STEPS = 10
MARKS = {
    "working": ("●", "green"),
    "waiting": ("◆", "yellow"),
    "over quota": ("◆", "yellow"),
    "idle": ("○", ""),
    "silent": ("▲", "yellow"),
    "ended": ("■", "dim"),
    "failed": ("✖", "red"),
}
TABLE_WIDTH = 110
"""The least width of a terminal, in characters, for a table of runs."""
_RUN_NUMBERS = ("steps", "loss", "gap", "tokens/s")
_STEP_COLUMNS = ("step", "loss", "gap", "clip fraction", "tokens/s", "step time (s)")


def view(answer: dict[str, Any]) -> RenderableType:
    """The answer of `/ui/api/state`, with the part `box` if the key is an admin's; or that of `/ui/api/runs/{id}`."""
    server = _server(answer["server"])
    if "history" in answer:
        return Group(server, Text(), _Runs([answer]), Text(), _steps(answer["history"][-LAST_STEPS:]))
    runs = _Runs(answer["runs"]) if answer["runs"] else Text("no runs with this key", style="dim")
    opened, in_flight = (sum(group[name] for group in answer["samplers"]) for name in ("open", "in_flight"))
    counts = Text(f"samplers: {opened} open, {in_flight} samples in flight")
    box = [Text(), _box(answer["box"])] if "box" in answer else []
    return Group(server, _stuck(answer), Text(), runs, Text(), counts, *box)


def _stuck(answer: dict[str, Any]) -> Text:
    names = {run["id"]: run["name"] or run["id"] for run in answer["runs"]}
    lines = ["stuck: nothing"] if not answer["stuck"] else []
    for one in answer["stuck"]:
        whose = "" if one["run"] is None else f"{names.get(one['run'], one['run'])}: "
        since = "" if one["since"] is None else f", since {duration(time.time() - one['since'])}"
        lines.append(f"stuck: {whose}{one['sentence']}{since}")
    return Text("\n").join(map(_plain, lines))


def _server(server: dict[str, Any]) -> Text:
    state = ("● ready", "green") if server["ready"] else ("▲ not ready", "red")
    reasons = f" {'; '.join(server['reasons'])}" if server["reasons"] else ""
    return Text.assemble(f"skyrl {server['version']} ", state, _plain(reasons))


class _Runs:
    """The runs as a table, or one below the other where a table would break words."""

    def __init__(self, runs: Iterable[dict[str, Any]]) -> None:
        self._runs = [*runs]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= TABLE_WIDTH:
            yield self._table()
            return
        for run in self._runs:
            yield _name(run)
            numbers = (f"{name} {number}" for name, number in zip(_RUN_NUMBERS, _numbers(run), strict=True))
            yield Padding(_state(run), (0, 0, 0, 2))
            yield Padding(Text(f"{', '.join(numbers)}, {_last_activity(run)}"), (0, 0, 0, 2))

    def _table(self) -> Table:
        table = _table("run", "state", numeric=_RUN_NUMBERS)
        table.add_column("last activity", no_wrap=True)
        for run in self._runs:
            table.add_row(_name(run), _state(run), *_numbers(run), _last_activity(run))
        return table


def _name(run: dict[str, Any]) -> Text:
    name = [] if run["name"] is None else [_plain(run["name"]), "\n"]
    return Text.assemble(*name, (run["id"], "dim"))


def _state(run: dict[str, Any]) -> Text:
    symbol, style = MARKS.get(run["state"], ("·", ""))
    return Text.assemble((f"{symbol} {run['state']}", style), f": {run['sentence']}")


def _numbers(run: dict[str, Any]) -> list[str]:
    step = run["last_step"] or {}
    return [str(run["steps"]), *(_number(step.get(column)) for column in ("loss", "gap", "tokens_per_second"))]


def _last_activity(run: dict[str, Any]) -> str:
    return f"{duration(time.time() - run['last_request_at'])} ago"


def _steps(steps: Iterable[dict[str, Any]]) -> Table:
    table = _table(numeric=_STEP_COLUMNS)
    columns = ("loss", "gap", "clip_fraction", "tokens_per_second", "busy_s")
    for step in steps:
        table.add_row(str(step["step"]), *(_number(step[column]) for column in columns))
    return table


def _vllm(numbers: dict[str, Any]) -> str:
    use, running, waiting = (numbers.get(name, 0) for name in ("kv_use", "running", "waiting"))
    return f"{numbers['replica']}: {running:.0f} run, {waiting:.0f} wait, cache {100 * use:.0f} % used"


def _box(box: dict[str, Any]) -> Table:
    models, adapters, disk = box["models"], box["adapters"], box["disk"]
    places = "" if adapters["places"] is None else f", {adapters['places']} at a time"
    lines = {
        "trainer": "none" if box["trainer"] is None else box["trainer"]["trouble"] or "ready",
        "API processes": str(len(box["api_processes"])),
        "pending requests": _counts(box["pending"]),
        "models": f"{models['running']} with a running command; waiting for: {_counts(models['waiting'])}",
        "adapters": f"{adapters['servable']} can be sampled{places}",
        "disk": f"{disk['free_bytes'] / 1e9:.1f} GB of {disk['total_bytes'] / 1e9:.1f} GB are free",
        "database": f"{box['database_bytes'] / 1e6:.1f} MB",
        "vLLM": "; ".join(_vllm(each) for each in box["vllm"]) or "none",
    }
    since = models["longest_wait_since"]
    if since is not None:
        lines["longest wait"] = duration(time.time() - since)
    table = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        table.add_row(Text(name, style="dim"), _plain(value))
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name.lower()} {number}" for name, number in sorted(counts.items())) or "none"


def _table(*texts: str, numeric: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numeric:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _plain(text: str) -> Text:
    """The text without control characters: a name must not move the cursor or change colours."""
    return Text("".join(letter if letter.isprintable() else "�" for letter in text))
