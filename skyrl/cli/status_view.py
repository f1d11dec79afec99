"""Draws the server's answers about runs for a terminal. Names come from clients: they are never read as markup, and
control characters in them are replaced."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from skyrl.api.request_status.status import duration

LAST_STEPS = 10
NEWEST_AGENTS = 10
MARKS = {
    "working": ("●", "green"),
    "waiting": ("◆", "yellow"),
    "over quota": ("◆", "yellow"),
    "idle": ("○", ""),
    "finished or gone": ("▲", "yellow"),
    "ended": ("■", "dim"),
    "failed": ("✖", "red"),
    "open": ("●", "green"),
    "usual": ("●", "green"),
    "unusual": ("▲", "red"),
    "too early": ("○", ""),
}
TABLE_WIDTH = 110
"""The least width of a terminal, in characters, for a table of runs."""
_RUN_NUMBERS = ("steps", "loss", "gap", "tokens/s")
_BOX_LINES = (
    "trainer",
    "API processes",
    "pending requests",
    "held back",
    "models",
    "adapters",
    "disk",
    "database",
    "vLLM",
    "longest wait",
)
_AGENT_NUMBERS = ("turns", "sampled", "forks", "reward")
_STEP_COLUMNS = ("step", "loss", "gap", "ratio", "clip fraction", "learning rate", "tokens/s", "step time (s)")


def view(answer: dict[str, Any]) -> RenderableType:
    """The answer of `/ui/api/state`, with the part `box` if the key is an admin's; or that of `/ui/api/runs/{id}`."""
    server, several = _server(answer["server"]), "base_models" in answer["server"]
    if "history" in answer:
        history = _steps(answer["history"][-LAST_STEPS:])
        health = [_numbers_of_health(answer["health"]), Text()] if "health" in answer else []  # older servers tell none
        return Group(server, Text(), *health, _Runs([answer], several), Text(), history)
    runs = _Runs(answer["runs"], several) if answer["runs"] else Text("no runs with this key", style="dim")
    opened, in_flight = (sum(group[name] for group in answer["samplers"]) for name in ("open", "in_flight"))
    counts = Text(f"samplers: {opened} open, {in_flight} samples in flight")
    box = [Text(), _box(answer["box"])] if "box" in answer else []
    agents = [Text(), *_agents(answer["agents"])] if answer.get("agents") else []
    return Group(server, _stuck(answer), Text(), runs, Text(), counts, *agents, *box)


def _stuck(answer: dict[str, Any]) -> Text:
    names = {run["id"]: run["name"] or run["id"] for run in answer["runs"]}
    lines = ["stuck: nothing"] if not answer["stuck"] else []
    for kind, one in [*(("stuck", one) for one in answer["stuck"]), *(("slow", one) for one in answer["slow"])]:
        whose = "" if one["run"] is None else f"{names.get(one['run'], one['run'])}: "
        since = "" if one["since"] is None else f", since {duration(time.time() - one['since'])}"
        lines.append(f"{kind}: {whose}{one['sentence']}{since}")
    return Text("\n").join(map(_plain, lines))


def _server(server: dict[str, Any]) -> RenderableType:
    """The server in one line. With several base models, the reasons stand beside the base models below."""
    models = server.get("base_models", [])
    if not models:
        return Text.assemble(f"skyrl {server['version']} ", _readiness(server), _reasons(server["reasons"]))
    degraded = server["ready"] and not all(model["ready"] for model in models)
    state = ("◆ degraded", "yellow") if degraded else _readiness(server)
    of_models = {f"{model['name']}: {reason}" for model in models for reason in model["reasons"]}
    others = [reason for reason in server["reasons"] if reason not in of_models]
    return Group(Text.assemble(f"skyrl {server['version']} ", state, _reasons(others)), _base_models(models))


def _readiness(part: dict[str, Any]) -> tuple[str, str]:
    return ("● ready", "green") if part["ready"] else ("▲ not ready", "red")


def _reasons(reasons: Sequence[str]) -> Text:
    return _plain(f" {'; '.join(reasons)}" if reasons else "")


def _base_models(models: Iterable[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for model in models:
        use = "training and sampling" if "train" in model["uses"] else "sampling"
        state = Text.assemble(_readiness(model), _reasons(model["reasons"]))
        table.add_row(_plain(model["name"]), Text(use, style="dim"), state)
    return table


class _Runs:
    """The runs as a table, or one below the other where a table would break words. With `several` base models, each run
    names its own."""

    def __init__(self, runs: Iterable[dict[str, Any]], several: bool) -> None:
        self._runs = [*runs]
        self._several = several

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= TABLE_WIDTH:
            yield self._table()
            return
        for run in self._runs:
            yield self._name(run)
            numbers = (f"{name} {number}" for name, number in zip(_RUN_NUMBERS, _numbers(run), strict=True))
            if (health := _health(run)) is not None:
                yield Padding(health, (0, 0, 0, 2))
            yield Padding(_state(run), (0, 0, 0, 2))
            yield Padding(Text(f"{', '.join(numbers)}, {_last_activity(run)}"), (0, 0, 0, 2))

    def _table(self) -> Table:
        table = _table("run", "state", numeric=_RUN_NUMBERS)
        table.add_column("last activity", no_wrap=True)
        for run in self._runs:
            state = Text("\n").join(part for part in (_health(run), _state(run)) if part is not None)
            table.add_row(self._name(run), state, *_numbers(run), _last_activity(run))
        return table

    def _name(self, run: dict[str, Any]) -> Text:
        lines = [] if run["name"] is None else [_plain(run["name"])]
        lines.append(Text(run["id"], style="dim"))
        if self._several:
            lines.append(_plain(run["base_model"]))
        return Text("\n").join(lines)


def _health(run: dict[str, Any]) -> Text | None:
    """A run's health as a word and its sentences; None if it is not told, or too early to tell."""
    health = run.get("health")
    if health is None or health["state"] == "too early":
        return None
    return Text("\n").join([_health_mark(health), *(_plain(f"  {each}") for each in health["sentences"])])


def _health_mark(health: dict[str, Any]) -> Text:
    symbol, style = MARKS.get(health["state"], ("·", ""))
    return Text(f"{symbol} health: {health['state']}", style)


def _numbers_of_health(health: dict[str, Any]) -> RenderableType:
    """The health of one run: its numbers beside what is usual, its sentences, and where the time goes."""
    table = _table("", "now", "usual", "", numeric=())
    for line in health["lines"]:
        table.add_row(line["name"], line["text"], line["usual"] or "–", Text(line["missing"] or "", style="dim"))
    sentences = [_plain(f"  {each}") for each in (*health["sentences"], *filter(None, [health["time"]]))]
    return Group(_health_mark(health), *sentences, Padding(table, (0, 0, 0, 2)))


def _state(run: dict[str, Any]) -> Text:
    symbol, style = MARKS.get(run["state"], ("·", ""))
    return Text.assemble((f"{symbol} {run['state']}", style), f": {run['sentence']}")


def _numbers(run: dict[str, Any]) -> list[str]:
    step = run["last_step"] or {}
    return [str(run["steps"]), *(_number(step.get(column)) for column in ("loss", "gap", "tokens_per_second"))]


def _last_activity(run: dict[str, Any]) -> str:
    return f"{duration(time.time() - run['last_request_at'])} ago"


def _agents(sessions: Sequence[dict[str, Any]]) -> Iterable[RenderableType]:
    """How many agent sessions are open, and the newest sessions."""
    opened = sum(session["state"] == "open" for session in sessions)
    yield Text(f"agent sessions: {opened} open")
    table = _table("session", "model", "state", numeric=(*_AGENT_NUMBERS, "last use"))
    for session in sessions[:NEWEST_AGENTS]:
        symbol, style = MARKS[session["state"]]
        reason = "" if session["end_reason"] is None else f" ({session['end_reason']})"
        table.add_row(
            _plain(session["name"] or session["session_id"]),
            _plain(session["model"]),
            Text(f"{symbol} {session['state']}{reason}", style),
            *(str(session[name]) for name in _AGENT_NUMBERS[:3]),
            _number(session["reward"]),
            f"{duration(time.time() - session['used_at'])} ago",
        )
    yield table


def _steps(steps: Iterable[dict[str, Any]]) -> Table:
    table = _table(numeric=_STEP_COLUMNS)
    columns = ("loss", "gap", "ratio", "clip_fraction", "learning_rate", "tokens_per_second", "busy_s")
    for step in steps:
        table.add_row(str(step["step"]), *(_number(step[column]) for column in columns))
    return table


def _vllm(numbers: dict[str, Any]) -> str:
    use, running, waiting = (numbers.get(name, 0) for name in ("kv_use", "running", "waiting"))
    why = "".join(f", {sentence}" for sentence in numbers.get("why", ()))
    return f"{numbers['replica']}: {running:.0f} run, {waiting:.0f} wait, cache {100 * use:.0f} % used{why}"


def _box(box: dict[str, Any]) -> Table:
    """The server's parts; those of several base models stand below the base model's name."""
    disk = box["disk"]
    of_server = {
        "API processes": str(len(box["api_processes"])),
        "pending requests": _counts(box["pending"]),
        "held back": f"{box.get('held_back', 0)} samples wait to be sent to the inference servers",
        "disk": f"{disk['free_bytes'] / 1e9:.1f} GB of {disk['total_bytes'] / 1e9:.1f} GB are free",
        "database": f"{box['database_bytes'] / 1e6:.1f} MB",
    }
    table = Table.grid(padding=(0, 2))
    if "base_models" not in box:
        lines = of_server | _lines_of_model(box)
        _add_lines(table, {name: lines[name] for name in _BOX_LINES if name in lines})
        return table
    _add_lines(table, of_server)
    for model in box["base_models"]:
        table.add_row(_plain(model["name"]))
        _add_lines(table, {f"  {name}": value for name, value in _lines_of_model(model).items()})
    return table


def _add_lines(table: Table, lines: Mapping[str, str]) -> None:
    for name, value in lines.items():
        table.add_row(Text(name, style="dim"), _plain(value))


def _lines_of_model(part: dict[str, Any]) -> dict[str, str]:
    """What belongs to a base model, by name."""
    models, adapters = part["models"], part["adapters"]
    places = "" if adapters["places"] is None else f", {adapters['places']} at a time"
    lines = {
        "trainer": "none" if part["trainer"] is None else part["trainer"]["trouble"] or "ready",
        "models": f"{models['running']} with a running command; waiting for: {_counts(models['waiting'])}",
        "adapters": f"{adapters['servable']} can be sampled{places}",
        "vLLM": "; ".join(_vllm(each) for each in part["vllm"]) or "none",
    }
    since = models["longest_wait_since"]
    if since is not None:
        lines["longest wait"] = duration(time.time() - since)
    return lines


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
