"""The router's options, for `skyrl router` and `skyrl rollout`, also under the names that other routers give them.

`skyrl sidecar` has the admin key's option from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyrl.http.admin_key import ADMIN_KEY_VARIABLE, ROUTER_KEY_VARIABLE

POLICY_HELP = "least_in_flight, round_robin, consistent_hashing or adapter_affinity."

Policy = Annotated[str | None, typer.Option("--policy", "--router-policy", "--sglang-router-policy", help=POLICY_HELP)]
Middleware = Annotated[
    list[str] | None,
    typer.Option(
        "--middleware",
        "--slime-router-middleware-paths",
        help="package.module.Class, file.py:Class, or radix; several are run in this order.",
    ),
]
MiddlewareOptions = Annotated[
    str | None, typer.Option(help="JSON for the middleware, e.g. '{\"radix_max_bytes\": 1000000000}'.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", "--hf-checkpoint", help="Directory with the model's tokenizer.json; the radix cache needs it."
    ),
]
MaxConnections = Annotated[
    int | None,
    typer.Option(
        "--max-connections",
        "--slime-router-max-connections",
        min=1,
        help="Requests at workers at once; more wait. Default: 4096.",
    ),
]
MaxWaiting = Annotated[
    int | None, typer.Option(min=0, help="Requests that may wait; more are answered with 503. Default: 16384.")
]
MaxBodyBytes = Annotated[int | None, typer.Option(min=1, help="The largest body of a request. Default: 67108864.")]
IntervalS = Annotated[
    float | None,
    typer.Option(
        "--health-check-interval-s",
        "--rollout-health-check-interval",
        "--health-check-interval-secs",
        min=0.05,
        help="Seconds between two health probes of a worker. Default: 5.",
    ),
]
FailureThreshold = Annotated[
    int | None,
    typer.Option(
        "--health-check-failure-threshold",
        "--slime-router-health-check-failure-threshold",
        min=1,
        help="Failed probes in a row until a worker gets no requests. Default: 3.",
    ),
]
HangS = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds of failed probes after which a worker's requests are broken off. Default: 60."),
]

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=ROUTER_KEY_VARIABLE,
        help=f"Key that every request must carry as Bearer; better set {ROUTER_KEY_VARIABLE}.",
    ),
]

AdminApiKey = Annotated[
    str | None,
    typer.Option(
        "--admin-api-key",
        envvar=ADMIN_KEY_VARIABLE,
        help=f"Key for pauses and new weights; better set {ADMIN_KEY_VARIABLE}. Without one: this machine alone.",
    ),
]
AdminLockS = Annotated[
    float | None, typer.Option(min=0, help="Seconds that a change of weights waits for another one. Default: 300.")
]
AdminUpdateS = Annotated[
    float | None, typer.Option(min=1, help="Seconds that a worker may take to change its weights. Default: 600.")
]

SEVERAL = frozenset(("--worker", "--worker-urls", "--middleware", "--slime-router-middleware-paths"))
"""Options that take several values after one flag."""
