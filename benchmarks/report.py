"""The HTML report: table, plots and facts in one file that loads nothing."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.series import CURVE
from benchmarks.table import COLUMNS, Row

matplotlib.use("Agg")
COLOURS = {"direct": "#9aa5b1", "forwarded": "#2364aa", "sdk": "#3c896d"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-top: 1px solid #dde3ea }
.yes { color: #22763b } .no { color: #b3261e; font-weight: 600 }
small { color: #5b6875 } svg { max-width: 100%; height: auto }
"""


def inline_svg(figure: Figure) -> str:
    """The figure as an SVG element for an HTML page. Closes the figure."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "skyrl"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def facts_list(facts: dict[str, Any]) -> str:
    return (
        "<p><small>" + " · ".join(f"{key}: {html.escape(str(value))}" for key, value in facts.items()) + "</small></p>"
    )


def page(title: str, parts: Iterable[str]) -> str:
    """A complete HTML page with these parts."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def rows_table(rows: Sequence[Row]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{header}</th>" for header in COLUMNS) + "</tr>"]
    for row in rows:
        cells = [html.escape(cell) for cell in row.cells()]
        if row.note:
            cells[0] += f"<br><small>{html.escape(row.note)}</small>"
        kind = {True: "yes", False: "no", None: ""}[row.met]
        inner = "".join(f"<td>{cell}</td>" for cell in cells[:-1])
        lines.append(f'<tr>{inner}<td class="{kind}">{cells[-1]}</td></tr>')
    return "\n".join([*lines, "</table>"])


def _loads(raw: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Loads by row and path. Of two direct loads of a row the last is taken."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for load in raw:
        if "samples_per_s" in load:
            found.setdefault(load["row"], {})[load["path"]] = load
    return found


def _bars(title: str, key: str, raw: Sequence[dict[str, Any]]) -> str:
    loads = _loads(raw)
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    paths = [path for path in COLOURS if any(key in by_path.get(path, {}) for by_path in loads.values())]
    for place, path in enumerate(paths):
        heights = [by_path.get(path, {}).get(key, 0) for by_path in loads.values()]
        at = [index + (place - (len(paths) - 1) / 2) * 0.8 / len(paths) for index in range(len(loads))]
        axes.bar(at, heights, 0.8 / len(paths), color=COLOURS[path], label=path)
    axes.set_xticks(range(len(loads)), list(loads), rotation=15)
    lowest = min((load[key] for by_path in loads.values() for load in by_path.values() if load.get(key)), default=1)
    axes.set(title=title, yscale="log")
    axes.set_ylim(bottom=lowest / 3)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return inline_svg(figure)


def _curves(name: str, by_path: dict[str, dict[str, Any]]) -> str:
    figure, axes = pyplot.subplots(figsize=(4.4, 3), layout="constrained")
    for path, load in by_path.items():
        axes.plot(load["latency_curve_ms"], CURVE, color=COLOURS[path], label=path)
    axes.set(title=name, xlabel="ms", xscale="log", ylabel="part of the samples", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return inline_svg(figure)


def bench_page(facts: dict[str, Any], rows: Sequence[Row], raw: Sequence[dict[str, Any]]) -> str:
    """The page with facts, table, throughput, CPU and latency of one run."""
    parts = [facts_list(facts), rows_table(rows)]
    if loads := _loads(raw):
        parts += [
            "<h2>Samples per second</h2>",
            _bars("samples/s (log)", "samples_per_s", raw),
            "<h2>CPU</h2><p>CPU of the process that answers: the API, or the null upstream itself.</p>",
            _bars("CPU seconds per 1,000 samples (log)", "server_cpu_s_per_1000", raw),
            "<h2>Latency</h2>",
            *(_curves(name, by_path) for name, by_path in loads.items()),
        ]
    folded = html.escape(json.dumps(raw))
    return page("Benchmarks", [*parts, f"<details><summary>Raw results</summary><pre>{folded}</pre></details>"])
