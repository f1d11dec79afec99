"""What an operator sets, and the sidecar's own limits. Reads nothing by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KNOWN_VARIABLE = "SKYRL_SIDECAR_KNOWN_FILE"
"""The environment variable by which a plane names `known_file` to its sidecar."""


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """`vllm_url` has no trailing slash. `max_in_flight` counts samples: prompts times n."""

    vllm_url: str
    vllm_api_key: str | None = None
    admin_key: str | None = None
    number: int = 0
    """Which of a plane's sidecars this is; its vLLM has the same number."""
    metrics_directory: Path | None = None
    """Where the processes of a plane publish their metrics; None: the sidecar has none around it."""
    known_file: Path | None = None
    """Where the sidecar keeps what the next one of the same vLLM must know; None: that ends with it."""
    host: str = "127.0.0.1"
    port: int = 30001
    max_in_flight: int = 8192
    max_body_bytes: int = 64 * 2**20
    max_answer_bytes: int = 256 * 2**20
    drain_s: float = 10.0
    """How long samples in flight may go on after a signal to stop. Then they are aborted, and answered."""
    abort_s: float = 5.0
    """How long vLLM may take to end an aborted sample. Then its connection is closed."""
    connect_s: float = 3.0
    control_s: float = 4.0
    """How long vLLM may take for an answer that needs no sampling. Health probes of clients wait 5 s."""
    health_token_s: float = 20.0
    update_s: float = 600.0
    """How long one update of the weights may take, or one bucket of it."""
    group_s: float = 120.0
    """How long a group with a trainer may take to form, and each broadcast in it, unless the trainer says otherwise."""
    lock_s: float = 300.0
    """How long a change of the weights waits for another one."""
    rpc_s: float = 60.0
    """How long a call into vLLM's workers may take. It waits for the end of the engine's present step."""
