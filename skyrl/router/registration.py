"""The routes by which workers come, go and are listed, in the dialects of several routers.

Each answer is the union of the dialects. docs/reference/router.md lists them and says which dialect wins where two
disagree. The routes do not contact the worker: a registration is answered at once, and probes follow.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, unquote

from skyrl.http.messages import Reply, json_reply
from skyrl.router.messages import RETRY_AFTER, error_reply, not_allowed
from skyrl.router.pool import WorkerPool
from skyrl.router.worker import Worker, WorkerState

MAX_LABEL_BYTES = 16 * 1024
MAX_REASON = 1000

_URL_NAMES = ("url", "worker_url")
_SERVICE = frozenset(("disabled", "is_dead"))
_REVIVALS = ("probe", "registration")
_OWN_FIELDS = frozenset(
    {
        *("id", "url", "worker_type", "is_healthy", "active_requests", "load", "state", "failed_probes"),
        *("connection_mode", "disabled", "disabled_reason", "is_dead", "missed", "changing", "routable"),
    }
)
"""Fields of a listed worker that no label replaces."""


class RegistrationRoutes:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def answer(self, method: str, path: str, query: bytes, body: bytes) -> Reply:
        """`path`, for which `is_registration` holds, may be percent-encoded."""
        try:
            if path.startswith("/workers/"):
                return self._one(method, path.removeprefix("/workers/"), query, body)
            if (refused := not_allowed(method, _METHODS[path])) is not None:
                return refused
            match path:
                case "/workers" if method == "GET":
                    return self._list()
                case "/workers" | "/add_worker":
                    return self._register(_fields(query, body), accepted=path == "/workers")
                case "/remove_worker":
                    return self._remove(_fields(query, body))
                case "/list_workers":
                    return json_reply(200, {"urls": [worker.url for worker in self._pool.workers]})
                case "/liveness" | "/live":
                    return json_reply(200, {"status": "ok"})
                case _:
                    return self._health(path)
        except ValueError as wrong:
            return error_reply(400, "BadRequestError", str(wrong))

    def _register(self, fields: dict[str, Any], *, accepted: bool) -> Reply:
        url, starts = _url(fields), _boolean("starting", fields)
        fields.pop("starting", None)
        if starts:
            if fields:
                raise ValueError(f"{min(fields)}: cannot be given together with starting")
            worker = self._pool.expect(url)
        else:
            worker = self._pool.add(
                url, _completions_url(fields), worker_type=_worker_type(fields), labels=_labels(fields)
            )
        if not accepted:
            in_flight = {worker.url: worker.in_flight for worker in self._pool.workers}
            return json_reply(200, {"status": "success", "worker_id": worker.id, "worker_urls": in_flight})
        location = f"/workers/{worker.id}"
        registered = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": location,
            "message": "the worker is registered",
            "worker": _listed(worker),
        }
        return json_reply(202, registered, [(b"location", location.encode())])

    def _remove(self, fields: dict[str, Any]) -> Reply:
        """An unknown worker is no error: clients of slime's router and of miles' raise on one. With `ended` the
        requests that are in flight there are broken off."""
        removed = self._pool.remove(_url(fields), ended=_boolean("ended", fields))
        return json_reply(200, {"status": "success", "message": "removed" if removed else "there was no such worker"})

    def _list(self) -> Reply:
        workers = self._pool.workers
        kinds = [worker.worker_type for worker in workers]
        stats = {f"{kind}_count": kinds.count(kind) for kind in ("prefill", "decode", "regular")}
        return json_reply(200, {"workers": [*map(_listed, workers)], "total": len(workers), "stats": stats})

    def _one(self, method: str, id_or_url: str, query: bytes, body: bytes) -> Reply:
        if (refused := not_allowed(method, ("GET", "PUT", "DELETE"))) is not None:
            return refused
        worker = self._pool.find(id_or_url) or self._pool.find(unquote(id_or_url))
        if worker is None:
            return error_reply(404, "NotFoundError", f"no worker has the id or URL {unquote(id_or_url)!r}")
        if method == "GET":
            return json_reply(200, _listed(worker))
        if method == "PUT":
            fields = _fields(query, body)
            self._set_service(worker, fields | {name: _boolean(name, fields) for name in fields.keys() & _SERVICE})
            return json_reply(200, {"status": "ok", "worker_id": worker.id, "worker": _listed(worker)})
        if query:
            raise ValueError(f"{query.decode('latin-1')[:MAX_REASON]}: DELETE takes no parameters")
        self._pool.remove(worker.id)
        return json_reply(202, {"status": "accepted", "worker_id": worker.id, "message": "the worker is being removed"})

    def _set_service(self, worker: Worker, fields: dict[str, Any]) -> None:
        """Raises ValueError, which names the field."""
        if not isinstance(fields.get("reason", ""), str) or len(fields.get("reason", "")) > MAX_REASON:
            raise ValueError(f"reason: not a string of at most {MAX_REASON} characters")
        if unknown := fields.keys() - {*_SERVICE, "reason"}:
            raise ValueError(f"{min(unknown)}: cannot be set; disabled, is_dead and reason can")
        if not fields.keys() & _SERVICE:
            raise ValueError("disabled, is_dead: one of them must be given")
        disabled = worker.disabled
        if "disabled" in fields:
            disabled = (fields.get("reason") or "by hand") if fields["disabled"] else None
        if fields.get("disabled") is False:  # enabled with the weights that it has
            self._pool.set_missed(worker, None)
        self._pool.set_service(worker, disabled=disabled, is_dead=fields.get("is_dead", worker.is_dead))

    def _health(self, path: str) -> Reply:
        routable = self._pool.routable
        counts = {"healthy_workers": routable, "total_workers": len(self._pool.workers)}
        if routable or self._pool.changing:  # requests wait for a change of weights, and are answered
            return json_reply(200, {"status": "ok" if path == "/health" else "ready", **counts})
        reason = "no worker is routable"
        unready = {"status": "not ready", "reason": reason, "error": {"code": 503, "message": reason}, **counts}
        return json_reply(503, unready, RETRY_AFTER)


HEALTH_PATHS = frozenset(("/health", "/live", "/liveness", "/readiness", "/ready", "/readyz"))
"""Answered without a key: load balancers ask them."""
_READ = ("GET", "HEAD", "POST")
_METHODS: dict[str, tuple[str, ...]] = {
    "/add_worker": ("POST",),
    "/remove_worker": ("POST",),
    "/list_workers": ("GET",),
    "/workers": ("GET", "POST"),
    **dict.fromkeys(HEALTH_PATHS, _READ),
}


def is_registration(path: str) -> bool:
    """Whether `RegistrationRoutes` answers this path."""
    return path in _METHODS or path.startswith("/workers/")


def _fields(query: bytes, body: bytes) -> dict[str, Any]:
    """The fields of the query and of the JSON body. Beside a URL in the query, what is no JSON object is ignored: some
    clients send such bodies. Raises ValueError for a field with two values."""
    in_query: dict[str, Any] = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        in_body = _json_object(body)
    except ValueError:
        if not any(in_query.get(name) for name in _URL_NAMES):
            raise
        in_body = {}
    for name in in_query.keys() & in_body.keys():
        if in_query[name] and in_body[name] not in (None, in_query[name], _boolean_or(in_query[name])):
            raise ValueError(f"{name}: differs in query and body")
    return in_body | {name: value for name, value in in_query.items() if value or not in_body.get(name)}


def _boolean_or(value: Any) -> Any:
    """A value of a query, which is text, as the body has it."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _boolean(name: str, fields: dict[str, Any]) -> bool:
    """False if the field is not given. Raises ValueError."""
    value = _boolean_or(fields.get(name, False))
    if not isinstance(value, bool):
        raise ValueError(f"{name}: not true or false")
    return value


def _json_object(body: bytes) -> dict[str, Any]:
    """An empty body is an empty object. Raises ValueError."""
    if not body.strip():
        return {}
    try:
        in_body = json.loads(body)
    except ValueError as wrong:
        raise ValueError(f"body: not JSON: {wrong}") from wrong
    except RecursionError as wrong:
        raise ValueError("body: nested too deeply") from wrong
    if not isinstance(in_body, dict):
        raise ValueError("body: not a JSON object")
    return in_body


def _url(fields: dict[str, Any]) -> str:
    given = {name: fields.pop(name) for name in _URL_NAMES if fields.get(name)}
    if not given:
        raise ValueError('url: missing; give it as ?url=... or as {"url": "..."}')
    if wrong := next((name for name, url in given.items() if not isinstance(url, str)), None):
        raise ValueError(f"{wrong}: not a string")
    if len(set(given.values())) > 1:
        raise ValueError("url and worker_url differ")
    return next(iter(given.values()))


def _completions_url(fields: dict[str, Any]) -> str | None:
    url = fields.pop("completions_url", None)
    if url is not None and not isinstance(url, str):
        raise ValueError("completions_url: not a string")
    return url or None


def _worker_type(fields: dict[str, Any]) -> str:
    worker_type = fields.pop("worker_type", None) or "regular"
    if worker_type != "regular":
        raise ValueError(
            f"worker_type: {worker_type!r} is not supported; this router sends a request to one worker, "
            'so every worker is "regular"'
        )
    return worker_type


def _labels(fields: dict[str, Any]) -> dict[str, object]:
    """The other fields. A key of an API is not kept: `GET /workers` would show it."""
    labels = {name: value for name, value in fields.items() if value is not None and name not in _URL_NAMES}
    if "api_key" in labels:
        raise ValueError("api_key: this router keeps no keys; the Authorization header of each request goes through")
    if labels.get("revive", "probe") not in _REVIVALS:
        raise ValueError(f"revive: not one of {', '.join(_REVIVALS)}")
    if wrong := labels.keys() & _OWN_FIELDS:
        raise ValueError(f"{min(wrong)}: the router sets this field itself")
    if len(json.dumps(labels)) > MAX_LABEL_BYTES:
        raise ValueError(f"body: the fields besides the URL exceed {MAX_LABEL_BYTES} bytes")
    return labels


def _listed(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "url": worker.url,
        "completions_url": worker.completions_url,
        "model_id": "unknown",
        "priority": 50,
        "cost": 1.0,
        "worker_type": worker.worker_type,
        "is_healthy": worker.state is WorkerState.HEALTHY,
        "state": worker.state.value,
        "active_requests": worker.in_flight,
        "load": worker.in_flight,
        "failed_probes": worker.failed_probes,
        "routable": worker.routable,
        "disabled": worker.disabled is not None,
        "disabled_reason": worker.disabled,
        "is_dead": worker.is_dead,
        "missed": worker.missed,
        "changing": worker.holds > 0,
        "connection_mode": "HTTP",
        "metadata": {},
        "disable_health_check": False,
        **worker.labels,
    }
