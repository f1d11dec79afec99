"""The demo's live view: both tenants' rewards, samples and training steps, and which process served the samples."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from skyrl.cli.demo.tenants import Run

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values in [0, 1] as block characters, the newest on the right."""
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, value) * len(BARS)))] for value in values[-width:])


def live_view(title: str, runs: dict[str, tuple[str, Run]], steps: int, status: dict[str, Any]) -> RenderableType:
    """`runs`: tenant -> (task, run so far). `status`: the server's `/statusz`."""
    table = Table(expand=True, box=None, header_style="bold")
    for column in ("tenant", "task", "reward", "", "steps", "samples", "sample s", "train s"):
        table.add_column(column, justify="left" if column in ("tenant", "task", "") else "right")
    for name, (task, run) in runs.items():
        table.add_row(
            name,
            task,
            f"{run.rewards[-1]:.2f}" if run.rewards else "–",
            Text(sparkline(run.rewards), style="green"),
            f"{len(run.rewards)}/{steps}",
            str(run.samples),
            f"{run.sample_s[-1]:.2f}" if run.sample_s else "–",
            f"{run.train_s[-1]:.2f}" if run.train_s else "–",
        )
    samples = status.get("samples", {})
    served = (
        f"samples served by vLLM, forwarded by the API: [bold]{samples.get('forwarded', 0)}[/]   "
        f"through the engine loop: [bold]{samples.get('engine', 0)}[/]   in flight: {samples.get('in_flight', 0)}"
    )
    return Panel(Group(table, Text.from_markup(served)), title=title)
