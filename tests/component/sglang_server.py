"""SGLang's routes for new weights, with the classes of its requests as its package has them.

The package cannot be imported without Triton. So the classes are compiled out of its source, with SGLang's own rule of
how JSON becomes one of them. What the server does with a request is written here, by what its source says: it loads at
once, also while samples are frozen, whose cache it does not flush; and it ignores fields that it does not know.
"""

from __future__ import annotations

import ast
import subprocess
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import fastapi
import msgspec
import pytest
from fastapi import Body, Request
from fastapi.responses import JSONResponse

from tests.environments import ROOT, environment

REQUIREMENTS = ROOT / "requirements" / "sglang.txt"
CLASSES = (
    *("BaseReq", "PauseGenerationReqInput", "ContinueGenerationReqInput", "UpdateWeightFromDiskReqInput"),
    *("UpdateWeightsFromTensorReqInput", "InitWeightsUpdateGroupReqInput", "UpdateWeightsFromDistributedReqInput"),
    *("CheckWeightsReqInput", "UpdateWeightVersionReqInput"),
)


def sglang_source() -> Path:
    """The directory of SGLang's package. Skips the test if the package cannot be had."""
    try:
        python = environment(REQUIREMENTS)
    except subprocess.CalledProcessError:
        pytest.skip(f"needs {REQUIREMENTS.read_text().splitlines()[-1]} from a package index")
    (package,) = (python.parents[1] / "lib").glob("python*/site-packages/sglang")
    return package


def request_classes() -> dict[str, Any]:
    """SGLang's, by their names."""
    package = sglang_source()
    rule = _module("msgspec_utils", (package / "srt/utils/msgspec_utils.py").read_text())
    source = ast.parse((package / "srt/managers/io_struct.py").read_text())
    found = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name in CLASSES]
    assert {node.name for node in found} == set(CLASSES), "this version of SGLang has other requests"
    module = _module("sglang_requests", ast.unparse(ast.Module([*found], [])), vars(typing) | vars(rule))
    return {name: getattr(module, name) for name in CLASSES}


def _module(name: str, source: str, names: dict[str, Any] | None = None) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({key: value for key, value in (names or {}).items() if not key.startswith("_")})
    exec(compile(source, name, "exec", flags=0, dont_inherit=True), vars(module))
    return module


@dataclass
class SglangServer:
    """`loaded`: the directory of each update, how generation was paused then, and the version. `unknown`: fields that
    SGLang's classes do not have."""

    samples: int = 0
    mode: str | None = None
    version: str = "default"
    loaded: list[tuple[str, str | None, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def application(self) -> fastapi.FastAPI:
        """As SGLang's HTTP server declares these routes."""
        classes, app = request_classes(), fastapi.FastAPI()
        handlers = {
            "/pause_generation": (self._pause, "PauseGenerationReqInput"),
            "/continue_generation": (self._continue, "ContinueGenerationReqInput"),
            "/update_weights_from_disk": (self._from_disk, "UpdateWeightFromDiskReqInput"),
            "/update_weights_from_tensor": (self._not_here, "UpdateWeightsFromTensorReqInput"),
            "/update_weights_from_distributed": (self._not_here, "UpdateWeightsFromDistributedReqInput"),
            "/init_weights_update_group": (self._not_here, "InitWeightsUpdateGroupReqInput"),
        }
        for path, (handler, name) in handlers.items():
            app.post(path)(self._route(handler, classes[name]))
        app.get("/model_info")(lambda: {"weight_version": self.version})
        app.get("/server_info")(lambda: {"tp_size": 1, "version": "0.5.23"})
        app.get("/v1/loads")(lambda: {"version": "0.5.23", "loads": [], "aggregate": {"total_reqs": self.samples}})
        app.get("/health")(lambda: {})
        return app

    def _route(self, handler: Any, kind: Any) -> Any:
        known = {one.name for one in msgspec.structs.fields(kind)}

        async def route(obj: Any, request: Request) -> JSONResponse:
            self.calls.append(request.url.path)
            self.unknown |= (await request.json()).keys() - known
            answer = handler(obj)
            return JSONResponse(answer, 400 if answer.get("success") is False else 200)

        route.__annotations__ = {"obj": Annotated[kind, Body()], "request": Request, "return": JSONResponse}
        return route

    def _pause(self, obj: Any) -> dict[str, Any]:
        self.mode = obj.mode
        if obj.mode == "abort":
            self.samples = 0
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, _: Any) -> dict[str, Any]:
        self.mode = None
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _from_disk(self, obj: Any) -> dict[str, Any]:
        if not Path(obj.model_path).is_dir():
            return {"success": False, "message": f"{obj.model_path} is no directory", "num_paused_requests": 0}
        self.loaded.append((obj.model_path, self.mode, obj.weight_version))
        if obj.flush_cache and self.mode == "in_place" and self.samples:
            message = "Weights were updated, but the cache was not flushed because requests are still running."
            return {"success": False, "message": message, "num_paused_requests": 0}
        self.version = obj.weight_version or self.version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": self.samples}

    def _not_here(self, _: Any) -> dict[str, Any]:
        raise AssertionError("this would change the weights while the server samples")
