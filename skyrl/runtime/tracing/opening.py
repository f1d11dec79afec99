"""Opens what a process needs to trace."""

from __future__ import annotations

from skyrl import __version__
from skyrl.runtime.tracing.spans import OtlpSpans, Spans


def open_spans(endpoint: str | None, process: str) -> Spans | None:
    """Spans to the collector; None without one. `process` is this process's name in traces. Raises ConfigError."""
    return None if endpoint is None else OtlpSpans(endpoint, process, __version__)
