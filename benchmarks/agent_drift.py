"""How many sampled tokens are lost to training because a conversation is tokenised anew: an agent session's, and those
of slime's adapters, side by side on the same scripted conversations and the same model.

Usage: python -m benchmarks.agent_drift --slime CHECKOUT [--conversations N]

slime's linearisation is its own code, `slime/agent/trajectory.py` of a checkout. Around it this file does what its
adapters do: the whole conversation is rendered and tokenised for each turn, and the answer is the decoded text.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks import program
from benchmarks.stage import ready_server
from skyrl.base.tiny import model_path

TENANT = {"X-API-Key": "tml-drift"}
SCRIPT = (
    "Who watches the river?",
    "And at night?",
    "Why do you say so?",
    "Count to ten.",
    "Sort d, a, c.",
    "Good bye.",
)
TOKENS = 24
TEMPERATURES = (0.7, 1.0, 1.3)


@dataclass
class Sample:
    """What slime's code needs of its class of this name, whose module loads the rest of slime."""

    class Status(Enum):
        COMPLETED = "completed"

    index: int = 0
    group_index: int = 0
    rollout_id: int | None = None
    prompt: str = ""
    label: str | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    reward: float = 0.0
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Lost:
    """Sampled tokens, and those of them that some row trains."""

    sampled: int = 0
    trained: int = 0

    def __str__(self) -> str:
        return f"{1 - self.trained / self.sampled:7.1%} of {self.sampled}"


def slimes(checkout: Path) -> Any:
    """slime's module of trajectories."""
    for name in ("slime", "slime.utils"):
        sys.modules[name] = types.ModuleType(name)
    stand_in: Any = types.ModuleType("slime.utils.types")
    stand_in.Sample = Sample
    sys.modules["slime.utils.types"] = stand_in
    spec = importlib.util.spec_from_file_location("slimes_trajectory", checkout / "slime/agent/trajectory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def through_slime(http: httpx.Client, module: Any, tokenizer: Any, temperature: float, seed: int, lost: Lost) -> None:
    manager, messages = module.TrajectoryManager(), list[dict[str, Any]]()
    for number, text in enumerate(SCRIPT):
        messages.append({"role": "user", "content": text})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": temperature}
        more = {"seed": 100 * seed + number, "return_token_ids": True, "logprobs": 0}
        answer = http.post("/v1/completions", json=body | more, headers=TENANT).raise_for_status().json()
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        said = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        turn = module.TurnRecord(prompt, ids, choice["finish_reason"], logprobs)
        manager.record_turn("one", turn=turn, prompt_messages=list(messages), response_message=said)
        messages.append(said)
        lost.sampled += len(ids)
    rows = manager.get_trajectory("one", base_sample=Sample())
    lost.trained += sum(sum(row.loss_mask) for row in rows)


def through_session(http: httpx.Client, temperature: float, seed: int, lost: Lost) -> None:
    made = http.post("/api/v1/agent_sessions", json={"model": "tiny"}, headers=TENANT).raise_for_status().json()
    key, messages = {"X-API-Key": made["key"]}, list[dict[str, Any]]()
    for number, text in enumerate(SCRIPT):
        messages.append({"role": "user", "content": text})
        body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "temperature": temperature}
        answer = http.post("/v1/chat/completions", json=body | {"seed": 100 * seed + number}, headers=key)
        said = answer.raise_for_status().json()
        lost.sampled += said["usage"]["completion_tokens"]
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    path = f"/api/v1/agent_sessions/{made['session_id']}/trajectory"
    rows = http.get(path, params={"format": "samples"}, headers=TENANT).raise_for_status().json()["rows"]
    lost.trained += sum(sum(row["loss_mask"]) for row in rows)


def main() -> None:
    parser = program.parser("agent_drift", __doc__)
    parser.add_argument("--slime", type=Path, required=True, help="a checkout of slime")
    parser.add_argument("--conversations", type=int, default=40)
    given = parser.parse_args()
    module, tokenizer = slimes(given.slime), AutoTokenizer.from_pretrained(model_path())
    with ready_server() as server, httpx.Client(base_url=server.url, trust_env=False, timeout=120) as http:
        for temperature in TEMPERATURES:
            theirs, ours = Lost(), Lost()
            for seed in range(given.conversations):
                through_slime(http, module, tokenizer, temperature, seed, theirs)
                through_session(http, temperature, seed, ours)
            print(f"temperature {temperature}: lost with slime {theirs}, in a session {ours}", flush=True)


if __name__ == "__main__":
    main()
