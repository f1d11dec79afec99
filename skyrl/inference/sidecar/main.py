"""The process of the sidecar: listens, serves, drains on SIGTERM.

`main` runs a sidecar of `skyrl serve`, through which the engine changes the weights of one vLLM. Its settings come from
the launcher's runtime file. Samples do not pass through it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import uvloop

from skyrl.http.serving import Server
from skyrl.inference.sidecar.app import open_sidecar
from skyrl.inference.sidecar.settings import SidecarSettings
from skyrl.runtime.processes.ports import listen
from skyrl.runtime.processes.runtime import SIDECAR_ENV, Runtime, run_process, set_up_process


def run_sidecar(settings: SidecarSettings, around: Callable[[Any], Any] = lambda sidecar: sidecar) -> None:
    """Serve until SIGTERM or SIGINT. `around` makes an ASGI application around the sidecar. Raises ConfigError if the
    address cannot be listened on."""
    uvloop.run(serve(settings, around))


async def serve(settings: SidecarSettings, around: Callable[[Any], Any] = lambda sidecar: sidecar) -> None:
    sockets = listen(settings.host, settings.port)
    async with open_sidecar(settings) as sidecar:
        await Server(around(sidecar), date_header=False).serve_until_signal(sockets, sidecar.drain)


def settings_of(runtime: Runtime, number: int) -> SidecarSettings:
    address = urlsplit(runtime.sidecar_urls[number])
    assert address.hostname is not None
    assert address.port is not None
    return SidecarSettings(
        vllm_url=runtime.replica_urls[number],
        vllm_api_key=runtime.inference_api_key,
        admin_key=runtime.inference_api_key,  # the server itself, and nobody else
        number=number,
        host=address.hostname,
        port=address.port,
        drain_s=0.0,
    )


def main() -> None:
    runtime = Runtime.from_environment()
    set_up_process(runtime.config.log_level, runtime.config.log_format, runtime.config.role.process("sidecar"))
    settings = settings_of(runtime, int(os.environ[SIDECAR_ENV]))
    run_process("the sidecar", lambda: run_sidecar(settings), lambda _: None)


if __name__ == "__main__":
    main()
