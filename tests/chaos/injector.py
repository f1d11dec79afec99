"""Injects the planned faults. Before each fault it waits until the server has recovered far enough to survive it.

The injector avoids two faults that the server does not survive by design (docs/decisions/interrupted-samples.md): a
command fails if the engine dies twice while the command runs, and a sample fails in the end if vLLM dies again and
again while the sample runs.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import httpx
import psutil

from skyrl.cli.demo.server import DemoServer
from tests.chaos.plan import DATABASE, ENGINE, LAUNCHER, NETWORK, VLLM_CORE, VLLM_SERVER, Fault, Kind
from tests.chaos.processes import alive, find
from tests.e2e.fault_proxy import Answer, Call, FaultProxy, late, lost_request, lost_response
from tests.e2e.fault_proxy import Fault as Effect

RECOVERY_S = 240.0
"""Within this time the server must have recovered from a fault."""
POLL_S = 0.1
ENDS_ENGINE = {ENGINE, LAUNCHER}
ENDS_VLLM = {VLLM_SERVER, VLLM_CORE, LAUNCHER}


class NotRecovered(RuntimeError):
    """The server has not recovered from a fault in time; the message names the next fault and the missing condition."""


class Injector:
    """Injects faults into one server, and counts them by name in `injected`."""

    def __init__(self, server: DemoServer, proxy: FaultProxy, say: Callable[[str], None]) -> None:
        self.injected: Counter[str] = Counter()
        self._server = server
        self._proxy = proxy
        self._say = say
        self._samples_at_death = -1
        self._database = server.state_dir / "skyrl.db"
        self._actions: dict[Kind, Callable[[Fault], bool]] = {
            "kill": self._kill,
            "stall": self._stall,
            "hang": self._hang,
            "lock": self._lock,
            "lose the answer": lambda fault: self._harm_next_call(fault, lost_response),
            "lose the request": lambda fault: self._harm_next_call(fault, lost_request),
            "delay": lambda fault: self._harm_next_call(fault, late(fault.seconds)),
        }

    def run(self, faults: Iterator[Fault], ends_at: float, tenants_run: Callable[[], bool]) -> None:
        """Inject `faults` until the monotonic time `ends_at`, or until a tenant has ended. Raises NotRecovered."""
        for fault in faults:
            time.sleep(max(0.0, min(fault.pause_s, ends_at - time.monotonic())))
            if time.monotonic() < ends_at:
                self._await_fairness(fault)
            if time.monotonic() >= ends_at or not tenants_run():
                return
            self._say(f"{fault.name}{f' for {fault.seconds:.1f} s' if fault.seconds else ''}{self._where(fault)}")
            self.injected[fault.name] += self._actions[fault.kind](fault)

    def _where(self, fault: Fault) -> str:
        return f" ({fault.path})" if fault.victim == NETWORK else ""

    # Waiting until a fault is fair

    def _await_fairness(self, fault: Fault) -> None:
        if fault.victim == NETWORK:
            return
        if fault.victim == DATABASE or fault.kind == "stall":
            self._await(fault, "its process", lambda: fault.victim == DATABASE or self._process(fault) is not None)
            return
        self._await(
            fault, "its process and an API that answers", lambda: bool(self._process(fault)) and self._answers()
        )
        if fault.victim in ENDS_ENGINE:
            self._await(fault, "the commands that the engine died of", lambda: not self._suspects())
        if fault.victim in ENDS_VLLM:
            self._await(fault, "a sample since vLLM's last death", lambda: self._samples() > self._samples_at_death)
            self._samples_at_death = self._samples()

    def _await(self, fault: Fault, what: str, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > RECOVERY_S:
                raise NotRecovered(f"before '{fault.name}': waited {RECOVERY_S:.0f} s in vain for {what}")
            time.sleep(POLL_S)

    def _process(self, fault: Fault) -> psutil.Process | None:
        try:
            return find(psutil.Process(self._server.pid), fault.victim)
        except psutil.NoSuchProcess:
            return None

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self._server.url}/api/v1/healthz", timeout=5.0, trust_env=False).is_success
        return False

    def _suspects(self) -> bool:
        """Whether a command that ran at a death of the engine has not ended since."""
        try:
            return bool(json.loads((self._server.state_dir / "running.json").read_text().partition("\n")[0])["deaths"])
        except ValueError:  # the engine is writing the file
            return True

    def _samples(self) -> int:
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True, timeout=30.0)) as connection:
            query = "select count(*) from futures where status = 'done' and kind = 'EXTERNAL'"
            return connection.execute(query).fetchone()[0]

    # The faults. Each method returns whether the fault was injected: its process may have ended by itself.

    def _kill(self, fault: Fault) -> bool:
        victim = self._process(fault)
        if victim is None or not _signal(victim, signal.SIGKILL):
            return False
        if fault.victim == LAUNCHER:
            self._server.stop()
            self._server.start()
        else:
            psutil.wait_procs([victim], timeout=RECOVERY_S)
        return True

    def _stall(self, fault: Fault) -> bool:
        victim = self._process(fault)
        if victim is None or not _signal(victim, signal.SIGSTOP):
            return False
        time.sleep(fault.seconds)
        _signal(victim, signal.SIGCONT)
        return True

    def _hang(self, fault: Fault) -> bool:
        """Stop the process, and wait until the watchdog has killed it."""
        victim = self._process(fault)
        if victim is None or not _signal(victim, signal.SIGSTOP):
            return False
        self._await(fault, "the end of the process that hangs", lambda: not alive(victim))
        return True

    def _lock(self, fault: Fault) -> bool:
        """Hold the write lock: no process of the server can commit meanwhile."""
        with closing(sqlite3.connect(self._database, isolation_level=None, timeout=RECOVERY_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(fault.seconds)
            connection.execute("ROLLBACK")
        return True

    def _harm_next_call(self, fault: Fault, effect: Effect) -> bool:
        """Harm the next request of the fault's path. The fault is counted when the request comes."""

        async def counted(call: Call) -> Answer | None:
            self.injected[fault.name] += 1
            return await effect(call)

        self._proxy.plan(fault.path, counted)
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process still existed."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
