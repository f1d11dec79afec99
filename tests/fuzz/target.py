"""The server that is fuzzed, objects of two tenants in it, and the checks of every answer."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from hypothesis import HealthCheck, Phase, settings

from skyrl.api.error_answers import is_anthropic, is_openai
from skyrl.base.wire import tinker_pb2 as pb
from tests.e2e.mortal_server import MortalServer

CANARY = f"canary-{secrets.token_hex(8)}"
"""The other tenant writes this text into every free field. No answer to the first tenant may hold it."""
SAVED = "saved"
BEAT_EVERY = 100
WAIT_S = 300.0
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
QUICK = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=QUIET, phases=[Phase.explicit, Phase.generate]
)
"""The same examples in every run."""


@dataclass
class Target:
    """`ids` holds the ids that routes take: `session`, `model`, ..., and `their_session`, ... of the other tenant."""

    server: MortalServer
    ids: dict[str, str] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    seq_id: int = 0

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.server.url, headers={"X-API-Key": "tml-fuzz"}, timeout=WAIT_S, trust_env=False
        )
        for owner, key in (("", "tml-fuzz"), ("their_", "tml-other")):
            self._populate(owner, {"X-API-Key": key})

    def _populate(self, owner: str, headers: dict[str, str]) -> None:
        note = {"note": CANARY} if owner else {"note": "mine"}

        def ok(path: str, body: Any) -> dict[str, Any]:
            answer = self.http.post(f"/api/v1/{path}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def done(path: str, body: Any) -> None:
            promise = ok(path, body)
            assert "error" not in self.outcome(promise["request_id"], headers)

        session = ok("create_session", {"user_metadata": note, "display_name": note["note"], "project_id": "p"})
        session = session["session_id"]
        model = f"{session}:train:0"
        new_model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
        done("create_model", new_model | {"user_metadata": note})
        for seq_id, route in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
            done(route, {"model_id": model, "seq_id": seq_id, "path": SAVED, "user_metadata": note})
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        named = {
            "session": session,
            "model": model,
            "sampler": ok("create_sampling_session", sampler)["sampling_session_id"],
            "path": f"tinker://{model}/weights/{SAVED}",
            "sampler_path": f"tinker://{model}/sampler_weights/{SAVED}",
        }
        self.ids |= {owner + name: value for name, value in named.items()}
        self.seq_id = 2

    def outcome(self, request_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Poll until a request has ended; returns its result."""
        poll = {"request_id": request_id}
        while True:
            answer = self.http.post("/api/v1/retrieve_future", json=poll, headers=headers)
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return answer.json()

    def fill(self, text: str) -> str:
        """`text` with `{names}` replaced by ids."""
        for name, value in self.ids.items():
            text = text.replace("{" + name + "}", value)
        return text

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send one request and check its answer."""
        if self.statuses.total() % BEAT_EVERY == 0:
            for owner, key in (("", "tml-fuzz"), ("their_", "tml-other")):
                beat = {"session_id": self.ids[f"{owner}session"]}
                headers = {"X-API-Key": key}
                assert self.http.post("/api/v1/session_heartbeat", json=beat, headers=headers).status_code == 200
        answer = self.http.request(method, path, **request)
        self.statuses[answer.status_code] += 1
        self.check(answer)
        return answer

    def check(self, answer: httpx.Response) -> None:
        """Fail if the server failed, if a refusal has no detail, or if the answer shows data of the other tenant."""
        description = f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:300]}"
        assert CANARY not in answer.text, description
        if answer.status_code < 400 or answer.status_code == 408:
            return
        not_ready = answer.status_code == 503 and answer.request.url.path == "/readyz"
        assert answer.status_code < 500 or not_ready, description
        if not not_ready:
            body = answer.json()
            path = answer.request.url.path
            if is_openai(path):
                assert set(body) == ({"error", "type", "request_id"} if is_anthropic(path) else {"error"}), description
                assert body["error"]["message"], description
                return
            assert set(body) == {"detail", "field", "request_id"}, description
            assert body["detail"], description
            assert body["field"] is None or body["detail"].startswith(f"{body['field']}: "), description

    def command(self, route: str, content: bytes, content_type: str = "application/json") -> dict[str, Any] | None:
        """Send a command; returns its result, which may be a failure of category "user". None if the command was
        refused at once. `content` must name the model and its next number."""
        answer = self.send("POST", f"/api/v1/{route}", content=content, headers={"Content-Type": content_type})
        if answer.status_code != httpx.codes.OK:
            return None
        self.seq_id += 1
        ended = self.outcome(answer.json()["request_id"])
        assert ended.get("category", "user") == "user", ended
        return ended

    def numbered(self, fields: bytes) -> bytes:
        """A JSON body of a command. Model and number come last, so that they override any in `fields`."""
        named = f'"model_id":"{self.ids["model"]}","seq_id":{self.seq_id + 1}'
        return b"{" + fields + b"," + named.encode() + b"}"

    def numbered_proto(self, fields: bytes) -> bytes:
        """The same as `numbered`, in protobuf."""
        header = pb.ForwardBackwardHeader(model_id=self.ids["model"], seq_id=self.seq_id + 1)
        return fields + header.SerializeToString()

    def peak_mib(self, module: str) -> float:
        """The largest resident memory so far of the server's process that runs `module`."""
        for process in psutil.Process(self.server.pid).children(recursive=True):
            if process.cmdline()[-1] == module:
                status = Path(f"/proc/{process.pid}/status").read_text()
                return int(status.split("VmHWM:")[1].split()[0]) / 2**10
        raise AssertionError(f"{module} does not run")

    def pids(self) -> set[int]:
        return {process.pid for process in psutil.Process(self.server.pid).children(recursive=True)}
