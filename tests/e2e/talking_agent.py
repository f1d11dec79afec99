"""An agent that speaks to the server over plain HTTP, and keeps its conversation as agents do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from skyrl.cli.demo.server import DemoServer


def manage(server: DemoServer, tenant_key: str, method: str, path: str, body: Any = None) -> Any:
    """A request of the tenant about its sessions."""
    url = f"{server.url}/api/v1/agent_sessions{path}"
    answer = httpx.request(method, url, json=body, headers={"X-API-Key": tenant_key}, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@dataclass
class TalkingAgent:
    """`id` and `key` are its session's."""

    server: DemoServer
    id: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begin(cls, server: DemoServer, tenant_key: str, name: str = "") -> TalkingAgent:
        """An agent in a new session, whose answers have at most 8 tokens."""
        body = {"model": "tiny", "name": name, "sampling": {"max_tokens": 8}}
        made = manage(server, tenant_key, "POST", "", body)
        return cls(server, made["session_id"], made["key"])

    def ask(self, path: str = "chat/completions", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """The answer to the conversation, which stays as it is."""
        body = {"model": "any", "messages": self.messages, **more}
        sent = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        return httpx.post(f"{self.server.url}/v1/{path}", json=body, headers=sent, timeout=60, trust_env=False)

    def says(self, text: str) -> str:
        """The model's answer to another message."""
        self.messages.append({"role": "user", "content": text})
        answer = self.ask()
        assert answer.status_code == 200, answer.text
        self.messages.append(answer.json()["choices"][0]["message"])
        return self.messages[-1]["content"]
