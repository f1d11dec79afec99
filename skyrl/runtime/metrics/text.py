"""Prometheus' text format: writes families with labels that are the same for all, and joins the texts of processes.

Knows no names of metrics. A joined text has HELP and TYPE of a family once, before the series of all processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HELP = "# HELP "


def rendered(families: Iterable[Metric], **labels: str) -> str:
    """The text of these families. Every series also gets `labels`."""
    common = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        about = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"{_HELP}{name} {about}", f"# TYPE {name} {family.type}"]
        for sample in family.samples:
            if sample.name.endswith("_created"):  # the time of a start; a series for each series
                continue
            own = [f'{key}="{_escaped(value)}"' for key, value in sample.labels.items()]
            text = ",".join([*own, *common])
            lines.append(f"{sample.name}{{{text}}} {floatToGoString(sample.value)}")
    return "\n".join([*lines, ""])


def joined(texts: Iterable[str]) -> str:
    """One text of several that `rendered` has written. A family has the HELP and TYPE of the first text that has it."""
    heads: dict[str, str] = {}
    series: dict[str, list[str]] = {}
    for text in texts:
        for block in text.removeprefix(_HELP).split(f"\n{_HELP}") if text else ():
            about, kind, *lines = block.rstrip("\n").split("\n")
            name = about.partition(" ")[0]
            heads.setdefault(name, f"{_HELP}{about}\n{kind}")
            series.setdefault(name, []).extend(lines)
    parts = [part for name, lines in series.items() for part in (heads[name], *lines)]
    return "\n".join([*parts, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
