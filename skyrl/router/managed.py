"""The router of `skyrl serve`: the process between the API processes and several vLLMs.

Takes its settings from the launcher's runtime file. It begins without workers: the engine registers a replica when the
replica has loaded the adapters in use. The list of workers is kept for the next start of the router.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from skyrl.router.main import RouterOptions, run_router
from skyrl.router.proxy import Limits
from skyrl.runtime.processes.runtime import Runtime, run_process, set_up_process

HEALTH_CHECK_INTERVAL_S, HEALTH_CHECK_TIMEOUT_S, HEALTH_CHECK_FAILURES = 1.0, 2.0, 2
"""A replica that hangs gets no new samples after 5 s. The engine registers it again as soon as it answers."""


def options_of(runtime: Runtime) -> RouterOptions:
    """The options of the router at `runtime.inference_url`.

    The limits are those of the API processes, so that requests wait in vLLM, which runs the most urgent first."""
    assert runtime.inference_url is not None
    config, address = runtime.config, urlsplit(runtime.inference_url)
    assert address.hostname is not None
    assert address.port is not None
    return RouterOptions(
        host=address.hostname,
        port=address.port,
        policy="adapter_affinity",
        limits=Limits(running=config.max_pending_samples * config.api_processes, body_bytes=config.max_body_bytes),
        health_check_interval_s=HEALTH_CHECK_INTERVAL_S,
        health_check_failure_threshold=HEALTH_CHECK_FAILURES,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        hang_s=config.backend_config.inference.health_timeout_s,
        state_dir=_workers_of(runtime),
        metrics_directory=runtime.metrics_directory,
        process=config.role.process("router"),
        metrics_labels=config.role.labels,
        base_models=config.served_names,
        key=runtime.inference_api_key,
        admin_key=runtime.inference_api_key,  # the server itself, and nobody else
        names_workers=True,
    )


def _workers_of(runtime: Runtime) -> Path:
    """The directory of the list of workers."""
    role = runtime.config.role
    return runtime.directory / f"router-{role.number}" if role.name else runtime.directory


def main() -> None:
    runtime = Runtime.from_environment()
    config = runtime.config
    set_up_process(config.log_level, config.log_format, config.role.process("router"))
    run_process("the router", lambda: run_router(options_of(runtime)), lambda _: None)


if __name__ == "__main__":
    main()
