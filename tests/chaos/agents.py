"""A tenant of agents as a process: each turn must call one of 300 tools, with OpenAI's client.

Usage as for `tests.chaos.tenant`. A turn that an outage ends is asked for again, as an agent does: an OpenAI request
has no row in the database. Any other answer than a call of one of the tools ends the process with an exception.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from benchmarks.unlike_load import tool
from tests.chaos import journal
from tests.chaos.journal import Step
from tests.chaos.training import BASE_MODEL

AGENTS, TURNS, TOOLS = 3, 2, 300
AGAIN_S = 1.0
TRANSIENT = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)


def step(client: openai.OpenAI, number: int) -> None:
    """TURNS turns of AGENTS agents at once."""
    with ThreadPoolExecutor(AGENTS) as pool:
        list(pool.map(lambda agent: _agent(client, f"agent {number} {agent}"), range(AGENTS)))


def _agent(client: openai.OpenAI, name: str) -> None:
    tools: Any = [tool(number) for number in range(TOOLS)]
    names = {each["function"]["name"] for each in tools}
    messages: list[Any] = [{"role": "user", "content": f"{name}: count"}]
    for _ in range(TURNS):
        answer = _asked(client, messages, tools)
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        assert calls or choice.finish_reason == "length", f"{name}: no call: {choice}"
        for call in calls:
            assert call.function.name in names, f"{name}: {call}"
            assert choice.finish_reason == "length" or isinstance(json.loads(call.function.arguments), dict)
        messages += [{"role": "assistant", "content": "counted"}, {"role": "user", "content": "and the next one"}]


def _asked(client: openai.OpenAI, messages: list[Any], tools: Any) -> Any:
    while True:
        try:
            return client.chat.completions.create(
                model=BASE_MODEL, messages=messages, tools=tools, tool_choice="required", max_tokens=64, temperature=0.0
            )
        except TRANSIENT:
            time.sleep(AGAIN_S)


def main() -> None:
    url, key, _, _, _, file = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=120.0, max_retries=0)
    print("ready", flush=True)
    number = 0
    while not number or not journal.told_to_end():
        began, began_at = time.monotonic(), time.time()
        step(client, number)
        journal.append(Path(file), Step(seconds=time.monotonic() - began, began_at=began_at))
        number += 1
    print("done", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
