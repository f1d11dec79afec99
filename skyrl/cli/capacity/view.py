"""Draws what `skyrl capacity` has found for a terminal."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skyrl.cli.capacity.answer import Answer, advice, far_off
from skyrl.cli.capacity.memory import TRAINER
from skyrl.cli.launcher.memory_estimate import gb

MB_BELOW = 1e9


def view(answer: Answer) -> RenderableType:
    setting, load = answer.setting, answer.load
    where = f"GPUs {', '.join(setting.gpus)}" if setting.gpus else f"{setting.cores} cores"
    binding = answer.limits[0]
    title = (
        f"{setting.base_model}, rank {setting.rank}: {answer.tenants} tenants can train at once, "
        f"{setting.engines * answer.slots} adapters are sampled from at once, "
        f"{setting.engines * max(setting.kept, answer.slots)} are kept"
    )
    shape = (
        f"{where}, {setting.threads} threads; a tenant has {load.samples} samples of {load.prompt} + {load.answer} "
        f"tokens in flight, and trains on {load.trained} tokens a pass"
    )
    lines = [Text(title, "bold"), Text(shape), Text(f"binds first: {binding.what} ({binding.then}): {binding.key}")]
    notes = [Text(f"note: {note}", "yellow") for note in answer.found.notes]
    if far := far_off(answer):
        notes.append(Text(f"note: more than 15 % from what skyrl doctor predicts: {', '.join(far)}", "yellow"))
    tables = [part for table in (_limits, _memory, _throughput, _operations) for part in (Text(), table(answer))]
    return Group(*lines, *tables, Text(), *notes, Text(advice(answer)))


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


def size(value: float) -> str:
    """Bytes for people, small ones too."""
    return f"{value / 1e6:,.1f} MB" if value < MB_BELOW else gb(value)


def _memory(answer: Answer) -> Table:
    table, found, predicted = _table("memory", "measured", "predicted"), answer.found, answer.predicted
    measured = {f"{name}, ready": (value, name) for name, value in found.ready.items()}
    measured["all, ready"] = (answer.room.ready, "ready")
    largest = "trainer in its largest pass"
    measured[f"trainer, in a pass of {found.passed.rows:,} tokens"] = (
        found.ready[TRAINER] + found.passed.bytes,
        largest,
    )
    if found.adapter is not None:
        measured["an adapter in training"] = (found.adapter, "adapter in training")
    if found.sampled is not None:
        measured["an adapter in vLLM"] = (found.sampled, "adapter in vLLM")
    for name, (value, key) in measured.items():
        table.add_row(name, size(value), size(predicted[key]) if key in predicted else "–")
    table.add_row("free before the start", size(found.available), "–")
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
