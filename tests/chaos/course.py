"""One run from start to findings: starts the server and the tenants, injects the faults, then repeats the training on a
server without faults.
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
from tests.chaos import journal, ledger, reference, training
from tests.chaos.injector import Injector, NotRecovered
from tests.chaos.journal import Step
from tests.chaos.kinds import KINDS, with_tools
from tests.chaos.plan import plan
from tests.chaos.processes import alive, tree
from tests.chaos.report import Results, Row
from tests.chaos.tenants import Tenant
from tests.e2e.fault_proxy import FaultProxy

START_S = 500.0
END_S = 600.0
"""Within this time after the last fault the tenants must have ended."""
BOUNDS = {"probe_interval_s": 1.0, "health_timeout_s": 12.0, "step_timeout_s": 20.0}
"""Short bounds, so that a vLLM that hangs is replaced soon."""
SLOWER = 5.0
"""How much longer bounds and pauses are for another model than the tiny one, whose prompts take seconds."""
CALM_S = 60.0
"""After the last fault the tenants go on for so long: these steps are compared with those alone."""
ALONE_S = 20.0
"""How long each tenant makes steps alone, after the run without faults."""


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
        self._calm_from = 0.0
        self._results = Results()

    def _config(self) -> dict[str, Any]:
        bounds = BOUNDS | {name: self._slower * BOUNDS[name] for name in ("health_timeout_s", "step_timeout_s")}
        return {"generator": {"inference_engine": bounds}, "trainer.policy.model.lora.max_lora_rank": training.RANK}

    def run(self) -> list[Row]:
        with ExitStack() as stack:
            server = DemoServer(self._directory / "state", *self._flags, backend_config=self._config())
            stack.callback(server.stop)
            server.start()
            server.wait_ready(START_S)
            proxy = stack.enter_context(FaultProxy(server.url))
            tenants = self._with_faults(stack, server, proxy)
            self._end(server)
        self._without_faults(server, tenants)
        return self._results.rows()

    def _with_faults(self, stack: ExitStack, server: DemoServer, proxy: FaultProxy) -> list[Tenant]:
        results = self._results
        seconds = self._seconds + self._slower * CALM_S
        tenants = [
            stack.enter_context(
                Tenant(self._directory, proxy.url, kind, self._seed + number, seconds, self._learning_rate)
            )
            for number, kind in enumerate(KINDS)
        ]
        for tenant in tenants:
            if not tenant.reports("ready", START_S):
                raise ServerFailed(f"tenant {tenant.task} got no model: {tenant.log_tail()}")
        self._say(f"{len(tenants)} tenants work")
        injector = Injector(server, proxy, self._say)
        try:
            ends_at = time.monotonic() + self._seconds
            injector.run(plan(self._seed, self._slower), ends_at, lambda: all(tenant.running for tenant in tenants))
        except (NotRecovered, ServerFailed) as error:
            results.troubles.append(str(error))
        self.injected = injector.injected
        self._say("no more faults")
        server.wait_ready(END_S)
        self._calm_from = time.time()
        for tenant in tenants:
            if not tenant.reports("done", END_S):
                results.troubles.append(f"tenant {tenant.task} did not finish: {tenant.log_tail()}")
        results.findings = ledger.read_again(server.url, ledger.promises(proxy.calls))
        self._say(f"{results.findings.accepted} results were read again")
        for tenant in tenants:
            tenant.end()
        return tenants

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
        found = {tenant: journal.read(tenant.journal) for tenant in tenants if tenant.journal.exists()}
        self._results.troubles += [f"tenant {tenant.task} made no step" for tenant in tenants if not found.get(tenant)]
        journals = {tenant: steps for tenant, steps in found.items() if tenant.trains}
        all_steps = [step for steps in journals.values() for step in steps]
        if all_steps:
            counts = " and ".join(str(len(steps)) for steps in journals.values())
            seconds = sorted(step.seconds for step in all_steps)
            self.work = (
                f"{counts} RL steps on {sum(len(step.samples) for step in all_steps):,} samples; a step took "
                f"{median(seconds):.1f} s (median), {seconds[-1]:.0f} s at most"
            )
        with ExitStack() as stack:
            server = DemoServer(self._directory / "reference", *self._flags, backend_config=self._config())
            stack.callback(server.stop)
            server.start()
            server.wait_ready(START_S)
            for tenant, steps in journals.items():
                with tinker.ServiceClient(base_url=server.url, api_key=tenant.key) as service:
                    comparison, final = reference.replay(service, tenant.seed, steps, tenant.learning_rate)
                self._results.comparisons[tenant.task] = comparison
                if not tenant.final or state_files(faulty, tenant.final) != state_files(server, final):
                    self._results.tenants_with_other_weights.append(tenant.task)
                self._say(f"{tenant.task}: trained again without faults")
            self._compare_times(server, found)

    def _compare_times(self, server: DemoServer, found: dict[Tenant, list[Step]]) -> None:
        """A tenant's step beside the others takes at most as long as its share, the number of tenants times its time
        alone, and the longest update of another tenant alone."""
        alone: dict[str, list[Step]] = {}
        (directory := self._directory / "alone").mkdir()
        for kind in KINDS:
            with Tenant(directory, server.url, kind, self._seed, ALONE_S, self._learning_rate) as tenant:
                if not tenant.reports("done", END_S):
                    raise ServerFailed(f"tenant {kind} made no step alone: {tenant.log_tail()}")
                alone[kind] = journal.read(tenant.journal)
        for tenant, steps in found.items():
            calm = [step.seconds for step in steps if step.began_at >= self._calm_from]
            longest = max(step.train_s for kind in KINDS if kind != tenant.task for step in alone[kind])
            own = median(step.seconds for step in alone[tenant.task])
            bound = len(KINDS) * own + longest
            told = f"{tenant.task}: {own:.1f} s alone, bound {bound:.1f} s, beside others "
            told += f"{median(calm):.1f} s (median), {max(calm):.1f} s at most" if calm else "no whole step"
            self._results.times.append(told)
            if not calm or median(calm) > bound:
                self._results.slow.append(told)
            self._say(told)


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
