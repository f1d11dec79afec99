"""Conversations with a tool, held by agents' frameworks that need an environment of their own. A program:

    python frameworks.py openai-agents|litellm BASE_URL KEY...

holds one conversation for each key, a session's, each in another dialect, whole or streamed. It writes a list of lines
in JSON: the arguments of the tool's calls, in the order of the keys.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import openai

CASES = [("chat", False), ("other", True)]
"""The dialect, and whether it is streamed. The other dialect is Responses for openai-agents, Messages for litellm."""
TASK = "Who watches the river?"
PLACES = ["north", "south"]
TURNS = 2
ROOM, TEMPERATURE = 6000, 2.0
"""As in test_agent_tools.py: the tiny model fills the grammar's space between words."""
Arguments = dict[str, Any]
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


async def openai_agents(url: str, key: str, dialect: str, streamed: bool) -> list[Arguments]:
    """The framework runs the tool itself, and asks again until it has had its turns."""
    library: Any = importlib.import_module("agents")

    asked: list[Arguments] = []

    async def look(place: Literal["north", "south"]) -> str:
        """See who is there."""
        asked.append({"place": place})
        return f"In the {place} is a heron."

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    kind = library.OpenAIChatCompletionsModel if dialect == "chat" else library.OpenAIResponsesModel
    thoughts = {"extra_body": NO_THOUGHTS} if dialect == "chat" else {"reasoning": {"effort": "none"}}
    agent = library.Agent(
        name="watcher",
        model=kind("tools", client),
        tools=[library.function_tool(look)],
        model_settings=library.ModelSettings(
            tool_choice="required", temperature=TEMPERATURE, max_tokens=ROOM, **thoughts
        ),
        reset_tool_choice=False,
    )
    with suppress(library.MaxTurnsExceeded):
        if streamed:
            run = library.Runner.run_streamed(agent, TASK, max_turns=TURNS)
            async for _ in run.stream_events():
                pass
        else:
            await library.Runner.run(agent, TASK, max_turns=TURNS)
    return asked


async def litellm(url: str, key: str, dialect: str, streamed: bool) -> list[Arguments]:
    """To Messages it sends no `strict`, so that the arguments need not fit the schema."""
    library: Any = importlib.import_module("litellm")

    schema = {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": PLACES}},
        "required": ["place"],
        "additionalProperties": False,
    }
    function = {"name": "look", "description": "See who is there.", "parameters": schema, "strict": True}
    where = {"model": "openai/tools", "api_base": f"{url}/v1", "extra_body": NO_THOUGHTS}
    if dialect != "chat":
        where = {
            "model": "anthropic/tools",
            "api_base": url,
            "thinking": {"type": "disabled"},
            "allowed_openai_params": ["thinking"],
        }
    messages: list[Any] = [{"role": "user", "content": TASK}]
    asked: list[Arguments] = []
    for _ in range(TURNS):
        answer: Any = await library.acompletion(
            **where,
            api_key=key,
            messages=messages,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            max_tokens=ROOM,
            temperature=TEMPERATURE,
            stream=streamed,
            num_retries=0,
        )
        if streamed:
            answer = library.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            asked.append(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "There is a heron."})
    return asked


async def main(framework: str, url: str, *keys: str) -> None:
    hold: Callable[..., Any] = {"openai-agents": openai_agents, "litellm": litellm}[framework]
    held = await asyncio.gather(*(hold(url, key, *case) for key, case in zip(keys, CASES, strict=True)))
    print(json.dumps(held))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
