"""A scripted server that is a vLLM and its sidecar in one, for tests of full weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fake_upstream import COMPLETIONS, FakeUpstream, Received, Reply, hang_up, reply
from replicas import WELL

from skyrl.inference.full_weights import VersionFiles
from skyrl.inference.vllm_plugin.protocol import INCARNATION

ONE, TWO, BASE = (VersionFiles(name, f"/files/{name}") for name in ("m@1", "m@2", "default"))
UPDATE, PAUSE, CONTINUE = "/update_weights_from_disk", "/pause_generation", "/continue_generation"


@dataclass
class Server:
    """Has the weights `version`. `calls` are the changes that it was asked for, in order."""

    upstream: FakeUpstream
    version: str = "default"
    starts: int = 1
    staged: str | None = None
    paused: bool = False
    refuses: str = ""
    """Files with this word in their directory are refused when they are read."""
    dies_applying: bool = False
    dead: bool = False
    waits: asyncio.Event | None = None
    """Reading takes until this is set."""
    calls: list[str] = field(default_factory=list)
    warmed_with: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Where the versions were that it was asked to read, in order."""

    def __post_init__(self) -> None:
        for path in ("/health", "/is_sleeping", COMPLETIONS, "/model_info", "/v1/loads", UPDATE, PAUSE, CONTINUE):
            self.upstream.controls[path] = self._answer

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        answer = hang_up if self.dead else await self._reply(request)
        await (hang_up if self.dead else answer)(request, writer)

    async def _reply(self, request: Received) -> Reply:
        match request.path:
            case "/health":
                return reply(200, b"", **{INCARNATION.replace("-", "_"): f"start {self.starts}"})
            case "/model_info":
                return reply(200, {"weight_version": self.version})
            case "/v1/loads":
                return reply(200, {"loads": [], "stages_updates": True})
            case "/pause_generation":
                self.calls.append(f"pause {request.json['mode']}")
                self.paused = True
            case "/continue_generation":
                self.calls.append("continue")
                self.paused = False
            case "/update_weights_from_disk":
                return await self._update(request)
            case _ if request.path == COMPLETIONS:
                self.warmed_with.append(self.version)
        return WELL if request.path != "/is_sleeping" else reply(200, {"is_sleeping": self.paused})

    async def _update(self, request: Received) -> Reply:
        version, directory = request.json["weight_version"], request.json["model_path"]
        assert request.json["flush_cache"] is False
        if request.json.get("stage_only"):
            self.calls.append(f"stage {version}")
            self.paths.append(directory)
            if self.waits is not None:
                await self.waits.wait()
            if self.refuses and self.refuses in directory:
                return reply(400, {"success": False, "message": f"{directory} is not finite"})
            self.staged = version
            return reply(200, {"success": True})
        self.calls.append(f"apply {version}")
        assert self.paused, "samples are paused while the weights change"
        assert self.staged == version
        if self.dies_applying:
            self.dead = True
        self.version = version
        return reply(200, {"success": True})

    def restart(self) -> None:
        self.starts, self.version, self.staged, self.paused, self.dead = self.starts + 1, "default", None, False, False
        self.dies_applying = False
