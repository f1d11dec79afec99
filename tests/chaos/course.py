"""One run from start to findings: lets each tenant work alone, then all beside each other while faults come, then for
a while without faults; then repeats the training on a server that has had none. May be ended at any moment: `rows` has
what was found until then, and names what was not checked.
"""

from __future__ import annotations

import fcntl
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import tinker

from skyrl.base.tiny import model_path
from skyrl.cli.demo.server import DemoServer, ServerFailed
from skyrl.storage.checkpoint_store.base import MANIFEST
from tests.chaos import ledger, reference, training
from tests.chaos.injector import Injector, NotRecovered
from tests.chaos.journal import Step
from tests.chaos.kinds import KINDS, with_tools
from tests.chaos.plan import plan
from tests.chaos.processes import alive, tree
from tests.chaos.report import Results, Row
from tests.chaos.tenants import Tenant
from tests.chaos.times import Times
from tests.e2e.fault_proxy import FaultProxy

START_S = 500.0
END_S = 600.0
"""Within this time after the last fault the tenants must have ended."""
BOUNDS = {"probe_interval_s": 1.0, "health_timeout_s": 12.0, "step_timeout_s": 20.0}
"""Short bounds, so that a vLLM that hangs is replaced soon."""
SLOWER = 5.0
"""How much longer bounds and pauses are for another model than the tiny one, whose prompts take seconds."""
ALONE_S = 20.0
"""How long each tenant works alone at least: then it ends the step that runs, the second or a later one."""
CALM_S = 20.0
"""After the last fault the tenants go on for so long at least, and until each has made a whole step."""
PARTS = ("each tenant alone", "faults", "steps beside the others", "reading results again", "training without faults")


class Course:
    """One run. `injected` counts the faults by name; `work` is one sentence about the steps that the tenants made."""

    def __init__(
        self, directory: Path, seed: int, seconds: float, say: Callable[[str], None], model: Path | None = None
    ) -> None:
        """`model`: a directory with a base model in place of the tiny one, of which trained adapters change less."""
        self.injected: Counter[str] = Counter()
        self.work = "the tenants made no step"
        self._directory = directory
        self._seed = seed
        self._seconds = seconds
        self._say = say
        base = with_tools(model or model_path(), directory / "model")
        self._flags = ("--base-model", str(base), "--served-model-name", training.BASE_MODEL)
        self._slower = 1.0 if model is None else SLOWER
        self._learning_rate = 2e-3 if model is None else 2e-4
        self._times = Times()
        self._results = Results(unchecked=[*PARTS])
        self._stack = ExitStack()

    def _config(self) -> dict[str, Any]:
        bounds = BOUNDS | {name: self._slower * BOUNDS[name] for name in ("health_timeout_s", "step_timeout_s")}
        return {"generator": {"inference_engine": bounds}, "trainer.policy.model.lora.max_lora_rank": training.RANK}

    def rows(self) -> list[Row]:
        return self._results.rows()

    @property
    def times(self) -> list[str]:
        """A line about each tenant's steps beside the others; none if these were not measured."""
        return self._results.times

    def close(self) -> None:
        """End the processes that run."""
        self._stack.close()

    def run(self) -> None:
        """Raises whatever ends it early."""
        try:
            server = self._server("state")
            self._say("each tenant works alone, for about two minutes")
            self._alone(server)
            self._done(1)
            proxy = self._stack.enter_context(FaultProxy(server.url))
            tenants = self._with_faults(server, proxy)
            self._end(server)
            self._without_faults(server, tenants)
            self._done(5)
        except ServerFailed as error:
            self._results.troubles.append(str(error))

    def _done(self, parts: int) -> None:
        self._results.unchecked = [*PARTS[parts:]]

    def _server(self, name: str) -> DemoServer:
        server = DemoServer(self._directory / name, *self._flags, backend_config=self._config())
        self._stack.callback(server.stop)
        server.start()
        server.wait_ready(START_S)
        return server

    def _alone(self, server: DemoServer) -> None:
        (directory := self._directory / "alone").mkdir()
        for kind in KINDS:
            with Tenant(directory, server.url, kind, self._seed, self._learning_rate) as tenant:
                began = time.monotonic()
                while not tenant.steps() or time.monotonic() < began + ALONE_S:
                    if not tenant.running:
                        raise ServerFailed(f"tenant {kind} failed alone: {tenant.log_tail()}")
                    time.sleep(0.5)
                tenant.enough()
                if not tenant.reports("done", END_S):
                    raise ServerFailed(f"tenant {kind} did not end alone: {tenant.log_tail()}")
                self._times.alone[kind] = steps = tenant.steps()
                tenant.end()
            self._say(f"{kind} alone: {', '.join(f'{step.seconds:.1f}' for step in steps)} s")

    def _with_faults(self, server: DemoServer, proxy: FaultProxy) -> list[Tenant]:
        results = self._results
        tenants = [
            self._stack.enter_context(
                Tenant(self._directory, proxy.url, kind, self._seed + number, self._learning_rate)
            )
            for number, kind in enumerate(KINDS)
        ]
        for tenant in tenants:
            if not tenant.reports("ready", START_S):
                raise ServerFailed(f"tenant {tenant.task} got no model: {tenant.log_tail()}")
        self._say(f"{len(tenants)} tenants work")
        injector = Injector(server, proxy, self._say)
        self.injected = injector.injected
        try:
            ends_at = time.monotonic() + self._seconds
            injector.run(plan(self._seed, self._slower), ends_at, lambda: all(tenant.running for tenant in tenants))
        except (NotRecovered, ServerFailed) as error:
            results.troubles.append(str(error))
        self._say("no more faults")
        self._done(2)
        server.wait_ready(END_S)
        self._calm(tenants)
        self._done(3)
        for tenant in tenants:
            if not tenant.reports("done", END_S):
                results.troubles.append(f"tenant {tenant.task} did not finish: {tenant.log_tail()}")
        results.findings = ledger.read_again(server.url, ledger.promises(proxy.calls))
        self._say(f"{results.findings.accepted} results were read again")
        self._done(4)
        for tenant in tenants:
            tenant.end()
        return tenants

    def _calm(self, tenants: list[Tenant]) -> None:
        """All go on until each has made a whole step, or is beyond its bound; then tell them to end."""
        most_s = max(CALM_S, self._times.calm_s)
        self._say(f"calm, for {most_s:.0f} s at most")
        since, began, waited_s, steps = time.time(), time.monotonic(), 0.0, dict[str, list[Step]]()
        try:
            while waited_s < most_s and (waited_s < CALM_S or not all(steps.values())):
                time.sleep(1.0)
                waited_s = time.monotonic() - began
                steps = {tenant.task: [step for step in tenant.steps() if step.began_at >= since] for tenant in tenants}
        finally:  # also when the run is ended
            self._results.times, self._results.slow = self._times.compared(steps, waited_s)
            for line in self._results.times:
                self._say(line)
        for tenant in tenants:
            tenant.enough()

    def _end(self, server: DemoServer) -> None:
        """Stop the server, then look for processes and files that it left behind and check its database."""
        launcher = psutil.Process(server.pid)
        processes = tree(launcher)
        temporary = (server.state_dir / "run").resolve()
        server.stop()
        self._results.leftovers += [str(process) for process in processes if alive(process)]
        self._results.leftovers += [str(path) for path in (temporary, server.state_dir / "run") if path.exists()]
        with (server.state_dir / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._results.leftovers.append("the lock on the state directory")
        command = [sys.executable, "-m", "skyrl.cli.main", "db", "check", "--state-dir", str(server.state_dir)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        if checked.returncode:
            self._results.database_faults += (checked.stdout + checked.stderr).splitlines()
        self._say("the server has stopped")

    def _without_faults(self, faulty: DemoServer, tenants: list[Tenant]) -> None:
        """Repeat the training of the tenants' journals on a new server."""
        found = {tenant: tenant.steps() for tenant in tenants}
        self._results.troubles += [f"tenant {tenant.task} made no step" for tenant in tenants if not found[tenant]]
        journals = {tenant: steps for tenant, steps in found.items() if tenant.trains}
        all_steps = [step for steps in journals.values() for step in steps]
        if all_steps:
            counts = " and ".join(str(len(steps)) for steps in journals.values())
            seconds = sorted(step.seconds for step in all_steps)
            self.work = (
                f"{counts} RL steps on {sum(len(step.samples) for step in all_steps):,} samples; a step took "
                f"{median(seconds):.1f} s (median), {seconds[-1]:.0f} s at most"
            )
        server = self._server("reference")
        for tenant, steps in journals.items():
            with tinker.ServiceClient(base_url=server.url, api_key=tenant.key) as service:
                comparison, final = reference.replay(service, tenant.seed, steps, tenant.learning_rate)
            self._results.comparisons[tenant.task] = comparison
            if not tenant.final or state_files(faulty, tenant.final) != state_files(server, final):
                self._results.tenants_with_other_weights.append(tenant.task)
            self._say(f"{tenant.task}: trained again without faults")


def state_files(server: DemoServer, path: str) -> dict[str, bytes]:
    """The files of a saved state by name: the adapter's weights and the optimizer's state."""
    model, _, name = path.removeprefix("tinker://").split("/")
    with closing(sqlite3.connect(server.state_dir / "skyrl.db")) as connection:
        query = "select store_key from checkpoints where model_id = ? and kind = 'weights' and name = ?"
        ((store_key,),) = connection.execute(query, (model, name)).fetchall()
    return {
        file.name: file.read_bytes()
        for file in (server.state_dir / "checkpoints" / store_key).iterdir()
        if file.name != MANIFEST
    }
