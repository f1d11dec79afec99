"""The files in which processes publish their metrics, as Prometheus' text: each process writes its own file, and any
process can answer from all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from skyrl.runtime.metrics.process import show_process

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


logger = logging.getLogger(__name__)

PERIOD_S = 2.0
"""How often a process writes its file."""
STALE_S = 15.0
"""An older file is left out: its process hangs, or has been killed and its number was given to another."""
FILE_VARIABLE = "SKYRL_METRICS_FILE"
"""The environment variable that names the file of a router or a sidecar that `skyrl rollout` has started."""


Labelled = tuple[CollectorRegistry, Mapping[str, str]]
"""A registry, and the labels that its series get besides the process's name."""


class MetricsDirectory:
    """The directory of one server. It must be private: any process that can write here is believed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.prepared: bytes | None = None
        """The answer to the next scrapes, in UTF-8; None if this process prepares none."""

    def write(self, name: str, text: str) -> None:
        """Replace the file of this name. Readers see the old text or the new. Raises OSError."""
        for directory in (self._path.parent, self._path):  # again: somebody may have cleaned /tmp
            directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self._path / f"{name}.{threading.get_ident()}"  # two threads may write the same file
        temporary.write_text(f"{os.getpid()}\n{text}")
        temporary.replace(self._file(name))

    def remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def read(self, names: Collection[str] | None = None) -> str:
        """The metrics of all processes that live, or of the files with these names."""
        texts = (self._text(file) for file in self._files() if names is None or file.stem in names)
        return joined(text for text in texts if text is not None)

    def prepare(self) -> None:
        """Read all files now, for the next answers."""
        self.prepared = None  # an old answer must not stay if this fails
        self.prepared = self.read().encode()

    async def answer(self) -> bytes:
        """What was prepared last, in UTF-8; where nothing is prepared, the files as they are now."""
        if self.prepared is not None:
            return self.prepared
        return (await asyncio.to_thread(self.read)).encode()

    def sweep(self) -> None:
        """Delete files that `read` leaves out."""
        for file in self._files():
            if self._text(file) is None:
                file.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.prom"

    def _files(self) -> list[Path]:
        return sorted(self._path.glob("*.prom"))

    @staticmethod
    def _text(file: Path) -> str | None:
        """None if the file is old or its process has ended. A server's processes have one user."""
        with contextlib.suppress(OSError, ValueError):
            if time.time() - file.stat().st_mtime <= STALE_S:
                number, _, text = file.read_text().partition("\n")
                os.kill(int(number), 0)
                return text
        return None


class MetricsWriter:
    """Writes the metrics of this process, labelled with its name, every PERIOD_S until `stop`. Those of `registry` also
    get `labels`, such as those of a base model; `more` are registries with labels of their own. The process that `owns`
    the directory also deletes the files of processes that have ended; one that `answers` scrapes prepares the answer
    after each writing."""

    def __init__(
        self,
        directory: MetricsDirectory,
        process: str,
        registry: CollectorRegistry,
        *,
        labels: Mapping[str, str] | None = None,
        more: Sequence[Labelled] = (),
        owns: bool = False,
        answers: bool = False,
    ) -> None:
        self._directory = directory
        self._process = process
        self._registry = registry
        self._parts: list[Labelled] = [(registry, labels or {}), *more]
        self._owns = owns
        self._answers = answers
        self._stopped = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        show_process(self._registry)
        self._thread.start()

    def stop(self) -> None:
        """End the thread if it was started, and delete the file."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            self._directory.remove(self._process)

    def write(self) -> None:
        """Write once, now. Raises OSError."""
        texts = (rendered(each.collect(), process=self._process, **labels) for each, labels in self._parts)
        self._directory.write(self._process, joined(texts))

    def _run(self) -> None:
        while True:
            try:
                try:
                    self.write()
                finally:  # a full disk hides no other process
                    if self._answers:
                        self._directory.prepare()
                if self._owns:
                    self._directory.sweep()
                self._failed = False
            except Exception:
                if not self._failed:  # the thread must go on, and the log must not fill
                    logger.exception("the metrics of this process could not be written; tried every %g s", PERIOD_S)
                self._failed = True
            if self._stopped.wait(PERIOD_S):
                return


@contextlib.asynccontextmanager
async def publishing(
    registry: CollectorRegistry,
    process: str,
    directory: MetricsDirectory | Path | None,
    *,
    labels: Mapping[str, str] | None = None,
    more: Sequence[Labelled] = (),
    answers: bool = False,
) -> AsyncIterator[MetricsDirectory]:
    """Publish the metrics of this process while the body runs, and prepare its answers if it `answers` scrapes of all
    processes. `labels` and `more` are as for MetricsWriter. A process without a server around it (`directory` None)
    uses a directory of its own."""
    with contextlib.ExitStack() as own:
        path = directory or Path(own.enter_context(tempfile.TemporaryDirectory(prefix="skyrl-metrics-")))
        published = MetricsDirectory(path) if isinstance(path, Path) else path
        writer = MetricsWriter(published, process, registry, labels=labels, more=more, answers=answers)
        writer.start()
        try:
            yield published
        finally:
            await asyncio.to_thread(writer.stop)
