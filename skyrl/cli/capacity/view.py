"""Draws what `skyrl capacity` has found for a terminal."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skyrl.cli.capacity.answer import IN_TRAINING, IN_VLLM, LARGEST_PASS, PASS, Answer, advice, far_off


def view(answer: Answer) -> RenderableType:
    setting, load = answer.setting, answer.load
    where = f"GPUs {', '.join(setting.gpus)}" if setting.gpus else f"{setting.cores} cores"
    title = f"{setting.base_model}, rank {setting.rank}"
    if answer.tenants is not None:
        title += (
            f": {answer.tenants:,} tenants can train at once, {setting.engines * answer.slots} adapters are sampled "
            f"from at once, {setting.engines * max(setting.kept, answer.slots)} are kept"
        )
    shape = (
        f"{where}, {setting.threads} threads; a tenant has {load.samples} samples of {load.prompt} + {load.answer} "
        f"tokens in flight, and trains on {load.trained} tokens a pass"
    )
    lines = [Text(title, "bold"), Text(shape)]
    if answer.limits:
        first = answer.limits[0]
        lines.append(Text(f"binds first: {first.what} ({first.then}): {first.key}"))
    notes = [Text(f"note: {note}", "yellow") for note in answer.found.notes]
    if far := far_off(answer):
        names = ", ".join(_label(name, answer) for name in far)
        notes.append(Text(f"note: more than 15 % from what skyrl doctor predicts: {names}", "yellow"))
    tables = [table(answer) for table in (_limits, _memory, _throughput, _operations)]
    parts = [part for table in tables if table.row_count for part in (Text(), table)]
    return Group(*lines, *parts, Text(), *notes, Text(advice(answer)))


def _table(*columns: str, texts: Collection[int] = (0,)) -> Table:
    """`texts`: the numbers of the columns that are words."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(columns):
        if number in texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _limits(answer: Answer) -> Table:
    table = _table("limit", "tenants", "with one more", "key", texts=(0, 2, 3))
    for limit in answer.limits:
        table.add_row(limit.what, f"{limit.tenants:,}", limit.then, limit.key)
    return table


def _label(name: str, answer: Answer) -> str:
    passed = answer.found.passed
    special = {
        PASS: f"trainer, in a pass of {passed.rows:,} tokens" if passed is not None else "",
        LARGEST_PASS: "trainer, at most",
        IN_TRAINING: "an adapter in training",
        IN_VLLM: "an adapter in vLLM",
    }
    return special.get(name) or f"{name}, ready"


def _memory(answer: Answer) -> Table:
    table, measured, predicted = _table("memory, MB", "measured", "predicted"), answer.measured, answer.predicted
    for name in {**measured, **predicted}:
        sizes = [f"{each[name] / 1e6:,.1f}" if name in each else "–" for each in (measured, predicted)]
        table.add_row(_label(name, answer), *sizes)
    table.add_row("free before the start", f"{answer.found.available / 1e6:,.1f}", "–")
    return table


def _throughput(answer: Answer) -> Table:
    parts = list(answer.found.throughput[0].cores) if answer.found.throughput else []
    table = _table("tokens per second, cores", "sampled", "trained", *parts)
    for row in answer.found.throughput:
        numbers = (f"{row.sampled_per_s:,.0f}", f"{row.trained_per_s:,.0f}")
        table.add_row(row.what, *numbers, *(f"{row.cores[part]:.2f}" for part in parts))
    return table


def _operations(answer: Answer) -> Table:
    table = _table("operation", "count", "median, s", "most, s")
    for each in answer.found.operations:
        table.add_row(each.name, str(each.count), f"{each.seconds:.3f}", f"{each.most:.3f}")
    return table
