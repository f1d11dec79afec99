"""Runs an agent of npm in an agent session of a server, where both see no other network than loopback:
`python -m tests.agents.without_network PROGRAMS DIRECTORY {sampled,scripted} {claude,codex}`.

`tests/agents/test_npm_agents.py` starts it in a namespace of its own, and reads what it writes to
DIRECTORY/found.json: a `Found`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from skyrl.base.tiny.tools import CHAT_TEMPLATE, CONTEXT, make
from skyrl.cli.demo.server import DemoServer
from tests.agents.scripted_vllm import ScriptedVllm, serving
from tests.agents.scripts import LAST, TOOLS, sampling_of, script
from tests.servers import ready

TENANT = {"X-API-Key": "tml-tests"}
SESSIONS = "/api/v1/agent_sessions"
AGENT_S = 240.0
"""How long an agent may take for its task."""
LOGGED = re.compile(r"(GET|HEAD|POST) (/v1/\S+) (\d{3}) ")
STRICT = """\
{%- for message in messages %}{% if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}
"""
"""The beginning of the model's template: Qwen3.5's rule. Both agents send more than one system message."""
CODEX = """\
model = "tiny"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
env_key = "AGENT_KEY"
wire_api = "responses"
"""


class Found(msgspec.Struct):
    """What came of a run. `requests` are those that the server logged: method, route, status. `turns` and `datums` are
    the rows that the server gives of the session; `asides` counts the requests that had other tools than the agent's;
    `scripted` counts those that the script answered."""

    exit_code: int
    seconds: float
    output: str
    requests: list[tuple[str, str, int]]
    session: dict[str, Any]
    turns: list[dict[str, Any]]
    datums: list[dict[str, Any]]
    scripted: int = 0
    asides: int = 0


def main(programs: Path, directory: Path, kind: str, agent: str) -> None:
    make(directory / "model")
    (directory / "model" / "chat_template.jinja").write_text(STRICT + CHAT_TEMPLATE)
    model = ("--base-model", str(directory / "model"), "--served-model-name", "tiny", "--access-log")
    if kind == "sampled":
        batched = {"enable_chunked_prefill": True, "max_num_batched_tokens": 4096}
        own = "generator.inference_engine."
        config = {f"{own}max_model_len": CONTEXT, f"{own}engine_init_kwargs": batched}
        with ready(DemoServer(directory / "state", *model, backend_config=config)) as server:
            found = _run(server, programs, directory, agent, "say hello", sampling_of(agent))
    else:
        scripted = ScriptedVllm(directory / "model", TOOLS[agent], script(agent, directory / "work"))
        with (
            serving(scripted) as upstream,
            ready(
                DemoServer(directory / "state", *model, "--backend", "none", "--external-inference-url", upstream)
            ) as server,
        ):
            found = _run(server, programs, directory, agent, f"Write the notes, then say {LAST!r}.", {})
        found.scripted, found.asides = scripted.said, scripted.aside
    found.requests = [(m, route, int(status)) for m, route, status in LOGGED.findall(_log(directory))]
    (directory / "found.json").write_bytes(msgspec.json.encode(found))


def _run(server: DemoServer, programs: Path, directory: Path, agent: str, task: str, sampling: dict[str, Any]) -> Found:
    with httpx.Client(base_url=server.url, headers=TENANT, trust_env=False) as client:
        made = (
            client.post(SESSIONS, json={"name": agent, "model": "tiny", "sampling": sampling}).raise_for_status().json()
        )
        began = time.monotonic()
        exit_code, output = _agent(server.url, made["key"], programs, directory, agent, task)
        seconds = time.monotonic() - began
        own = f"{SESSIONS}/{made['session_id']}"
        session = client.get(own).raise_for_status().json()
        turns = _all_rows(client, f"{own}/turns")
        datums = _all_rows(client, f"{own}/trajectory?format=datums")
    return Found(exit_code, seconds, output, [], session, turns, datums)


def _all_rows(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    offset: str | int = 0
    while True:
        page = client.get(path, params={**httpx.URL(path).params, "offset": offset}, timeout=60)
        read = page.raise_for_status().json()
        rows += read["rows"]
        if read["next_offset"] is None:
            assert len(rows) == read["total"]
            return rows
        offset = read["next_offset"]


def _agent(url: str, key: str, programs: Path, directory: Path, agent: str, task: str) -> tuple[int, str]:
    """Run the agent in an empty directory and home. Returns its exit code and the end of its output."""
    work, home = directory / "work", directory / "home"
    work.mkdir()
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    if agent == "claude":
        command = ["claude", "-p", task, "--dangerously-skip-permissions"]
        mine = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_MODEL": "tiny",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # Claude Code runs as root only in a sandbox
        }
    else:
        command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]
        mine = {"CODEX_HOME": str(home / ".codex"), "AGENT_KEY": key}
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    with (directory / "agent.log").open("w") as log:
        done = subprocess.run(
            [str(programs / command[0]), *command[1:]],
            cwd=work,
            env=kept | {"HOME": str(home)} | mine,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=AGENT_S,
            check=False,
        )
    return done.returncode, (directory / "agent.log").read_text()[-2000:]


def _log(directory: Path) -> str:
    return (directory / "state" / "logs" / "api.log").read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
