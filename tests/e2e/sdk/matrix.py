"""One run of the catalogue per released SDK, each in an isolated environment, all against the same two servers.

Knows where the environments are and which answers count as surprises; knows nothing of pytest or of the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

from skyrl.base.tiny import model_path
from tests.environments import ROOT, environment

from .catalogue import ANNOUNCEMENT, QUESTION
from .features import CATALOGUE
from .user import MODEL

MAX_BODY = 256 * 2**20
SAID = 300
"""The number of characters kept of a refusal's body."""
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "te", "upgrade"}
NAMES = (
    (re.compile(r"^(/api/v1/(?:training_runs|sessions|samplers)/)(?!search$)[^/]+"), r"\1{id}"),
    (re.compile(r"(/checkpoints/)[^/]+/[^/]+"), r"\1{kind}/{name}"),
    (re.compile(r"^(/api/v1/downloads/[^/]+/).*"), r"\1..."),
)


@dataclass(frozen=True)
class Answer:
    """One answer of the server."""

    feature: str
    route: str
    """Method and path, with placeholders such as `{id}` for names."""
    status: int
    said: str
    """The beginning of the body, for statuses of 400 and above."""


def route_of(method: str, path: str) -> str:
    for names, placeholder in NAMES:
        path = names.sub(placeholder, path)
    return f"{method} {path}"


class Recorder:
    """The proxy. It runs in its own thread inside the `with` block."""

    def __init__(self, server: str) -> None:
        self.answers: list[Answer] = []
        self.url = ""
        self._server = server
        self._feature = ""
        self._asked: Counter[str] = Counter()
        """By route: requests since the feature began."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # If a client disconnects, the proxy closes its request to the server too.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        # One connection per request: the server could close an idle connection in the moment of its next use.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(
            connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False
        ) as self._client:
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith(ANNOUNCEMENT):
            self._feature = request.path.removeprefix(ANNOUNCEMENT)
            self._asked.clear()
            return web.Response()
        if request.path.startswith(QUESTION):
            return web.json_response(self._asked[request.path.removeprefix(QUESTION)])
        feature = self._feature
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        # The server builds links from the address of the request. The links must lead to this proxy.
        headers.append(("Host", request.host))
        body = await request.read()
        url = URL(self._server + request.raw_path, encoded=True)
        route = route_of(request.method, request.path)
        self._asked[route] += 1
        try:
            async with self._client.request(
                request.method,
                url,
                headers=headers,
                data=body,
                allow_redirects=False,
                skip_auto_headers=("User-Agent",),
            ) as answer:
                content = await answer.read()
        except ClientError as error:
            self.answers.append(Answer(feature, route, web.HTTPBadGateway.status_code, f"no answer: {error!r}"))
            raise web.HTTPBadGateway from error
        said = content[:SAID].decode(errors="replace") if answer.status >= 400 else ""
        self.answers.append(Answer(feature, route, answer.status, said))
        kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP]
        return web.Response(status=answer.status, body=content, headers=dict(kept))


REQUIREMENTS = ROOT / "requirements" / "sdk"
RUN_S = 1500
AT_ONCE = 2
"""Versions that run at the same time; more gain nothing on two cores."""
TORCH = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe")
"""Packages that custom losses need besides the SDK; borrowed from this environment because of their size."""

LOG = 4000
"""The number of characters shown of a failed run's log."""

UNCALLED = {
    "SamplingClient.on_queue_state_change": "the SDK calls it itself",
}
"""Public methods that no check calls, with the reason."""

UNTRIED_COMMANDS = {
    "tinker checkpoint push-hf": "uploads to the Hugging Face hub",
}


def versions() -> list[str]:
    """The released SDKs of the matrix, newest first."""
    found = [path.stem.removeprefix("tinker-") for path in REQUIREMENTS.glob("tinker-*.txt")]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))), reverse=True)


@dataclass(frozen=True)
class Result:
    """The results of one SDK version."""

    version: str
    features: dict[str, dict[str, Any]]
    """By name: status (ok, absent, broken, refused or FAILED), error text, seconds."""
    methods: dict[str, list[str]]
    """Public methods by client class."""
    commands: list[str]
    called: dict[str, list[str]]
    """By feature: public methods that the feature's check called itself."""
    answers: list[Answer]

    @property
    def failures(self) -> dict[str, str]:
        """Tracebacks of failed checks, by feature."""
        return {name: found["said"] for name, found in self.features.items() if found["status"] == "FAILED"}

    @property
    def kept(self) -> dict[str, Any]:
        """What the compatibility page is made from: statuses by feature without absent ones, what bugs of the SDK did,
        and the public methods, commands and routes."""
        present = {name: found for name, found in self.features.items() if found["status"] != "absent"}
        return {
            "features": {name: found["status"] for name, found in present.items()},
            "bugs": {name: found["said"] for name, found in present.items() if found["status"] == "broken"},
            "methods": sorted(self.public),
            "commands": sorted(self.commands),
            "routes": sorted(self.routes),
        }

    @property
    def tried(self) -> set[str]:
        return {method for called in self.called.values() for method in called}

    @property
    def public(self) -> set[str]:
        return {f"{owner}.{method}" for owner, methods in self.methods.items() for method in methods}

    @property
    def tried_commands(self) -> set[str]:
        present = (name for name, found in self.features.items() if found["status"] != "absent")
        return {need for name in present for need in CATALOGUE[name].needs if need.startswith("tinker ")}

    @property
    def routes(self) -> set[str]:
        return {answer.route for answer in self.answers}

    @property
    def surprises(self) -> list[str]:
        """Answers with status 400 or above that no check provokes. Status 408 is the normal end of a long poll without
        a result."""
        return sorted(
            {
                f"{answer.feature}: {answer.route} -> {answer.status} {answer.said}"
                for answer in self.answers
                if answer.status >= 400 and answer.status != 408 and answer.status not in expected(answer.feature)
            }
        )


def expected(feature: str) -> frozenset[int]:
    return CATALOGUE[feature].statuses if feature in CATALOGUE else frozenset()


def isolated(version: str, directory: Path) -> tuple[Path, dict[str, str]]:
    """The Python of a version's environment, and the environment variables for it.

    `directory` becomes the working and home directory. It holds the model's tokenizer under the model's name, where the
    SDK finds the tokenizer without network.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = directory / MODEL
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    if not tokenizer.exists():
        tokenizer.symlink_to(model_path())
    lent = directory / "lent"
    lent.mkdir(exist_ok=True)
    for name in TORCH:
        spec = find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        if not (lent / name).exists():
            (lent / name).symlink_to(spec.submodule_search_locations[0])
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    set_here = {"HOME": str(directory), "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{lent}"}
    return environment(REQUIREMENTS / f"tinker-{version}.txt"), kept | set_here


def run_version(version: str, server: str, seeing: str, directory: Path) -> Result:
    """Run the catalogue with one SDK. `server` and `seeing` are the URLs of two servers; the model of the second takes
    pictures. Raises RuntimeError if the run itself fails."""
    python, env = isolated(version, directory)
    out = directory / "result.json"
    with Recorder(server) as recorder, Recorder(seeing) as seeing_recorder:
        key = f"tml-matrix-{version}-{os.getpid()}"
        command = [python, "-m", "tests.e2e.sdk.run", "--url", recorder.url, "--seeing-url", seeing_recorder.url]
        command += ["--key", key, "--out", out]
        log = directory / "run.log"
        try:
            with log.open("wb") as said:
                subprocess.run(command, cwd=directory, env=env, check=True, timeout=RUN_S, stdout=said, stderr=said)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"the run with {version} broke: {error}\n{log.read_text()[-LOG:]}") from error
    told = json.loads(out.read_text())
    assert told["sdk"] == version
    answers = recorder.answers + seeing_recorder.answers
    return Result(version, told["features"], told["methods"], told["commands"], told["called"], answers)
