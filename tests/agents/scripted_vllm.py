"""A server that answers chats as vLLM does, but says what a script says: so an agent does what its test wants.

It speaks what a gateway asks of vLLM for agents: `/v1/chat/completions`, whole and as a stream, `/tokenize`,
`/v1/models` and `/health`. Prompts are rendered with the model's template by transformers, or taken as they are from
`kv_transfer_params.prompt_token_ids`. Sampled ids are those of the script's text as the model would write it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoTokenizer

LOGPROB = -0.5
"""Of each sampled token."""
PIECE = 24
"""Characters of a tool call's arguments in one chunk."""


@dataclass(frozen=True)
class Call:
    """A call of one of the agent's tools."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


ASIDE = Said("A small task")
"""The answer to a request without the agent's tools, such as one for a title."""


class ScriptedVllm:
    """`model` is the directory of a model. Each request that has the tool `tool` is answered with the next line of the
    `script`; after the last one, with the last one again."""

    def __init__(self, model: Path, tool: str, script: Sequence[Said]) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        self._end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
        self._tool = tool
        self._script = script
        self.said = 0
        """Requests that were answered from the script."""
        self.aside = 0
        """Requests without the tool."""
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ]
        )

    async def _health(self, _: Request) -> Response:
        return Response()

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny", "max_model_len": self._context}]})

    async def _tokenize(self, request: Request) -> Response:
        ids = self._rendered(await request.json())
        return JSONResponse({"count": len(ids), "max_model_len": self._context, "tokens": ids})

    async def _chat(self, request: Request) -> Response:
        asked = await request.json()
        prompt = (asked.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = self._rendered(asked) if prompt is None else prompt
        said = self._next(asked)
        deltas = list(self._deltas(said))
        finish = "tool_calls" if said.calls else "stop"
        head = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": asked["model"]}
        if asked.get("return_token_ids"):
            head["prompt_token_ids"] = prompt
        if asked.get("stream"):
            return StreamingResponse(_events(head, prompt, deltas, finish), media_type="text/event-stream")
        tokens = [token for _, ids in deltas for token in ids]
        choice = {"index": 0, "message": _message(said), "logprobs": _logprobs(tokens), "finish_reason": finish}
        whole = {"object": "chat.completion", "choices": [choice], "usage": _usage(len(prompt), len(tokens))}
        return JSONResponse(head | whole)

    def _next(self, asked: dict[str, Any]) -> Said:
        if self._tool not in [tool["function"]["name"] for tool in asked.get("tools") or ()]:
            self.aside += 1
            return ASIDE
        said = self._script[min(self.said, len(self._script) - 1)]
        self.said += 1
        return said

    def _rendered(self, asked: dict[str, Any]) -> list[int]:
        """The tokens of a prompt, as vLLM makes them."""
        given = dict(asked.get("chat_template_kwargs") or {})
        if (effort := asked.get("reasoning_effort")) is not None:
            given = {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort}
        text = self._tokenizer.apply_chat_template(
            [for_template(message) for message in asked["messages"]],
            tools=asked.get("tools"),
            add_generation_prompt=True,
            tokenize=False,
            **given,
        )
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _deltas(self, said: Said) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """The parts of an answer, each with the tokens that it is read from."""
        if said.reasoning:
            yield {"reasoning": said.reasoning}, self._ids(f"<think>\n{said.reasoning}\n</think>\n\n")
        if said.text:
            yield {"content": said.text}, self._ids(said.text)
        for index, call in enumerate(said.calls):
            gap = "\n" if said.text or index else ""
            named = {"name": call.name, "arguments": ""}
            begun = {"index": index, "id": _call_id(index), "type": "function", "function": named}
            text = f'{gap}<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": '
            yield {"tool_calls": [begun]}, self._ids(text)
            arguments = json.dumps(call.arguments)
            for at in range(0, len(arguments), PIECE):
                piece = arguments[at : at + PIECE]
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, self._ids(piece)
            yield {}, self._ids("}\n</tool_call>")
        yield {}, [self._end]


@contextmanager
def serving(scripted: ScriptedVllm) -> Iterator[str]:
    """The server's address, while it runs in a thread."""
    web = uvicorn.Server(uvicorn.Config(scripted.app, port=0, lifespan="off", log_level="error", ws="none"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = web.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    web.should_exit = True
    thread.join()


def _events(
    head: dict[str, Any], prompt: list[int], deltas: list[tuple[dict[str, Any], list[int]]], finish: str
) -> Iterator[str]:
    head = head | {"object": "chat.completion.chunk"}
    sampled = 0
    parts = [({"role": "assistant", "content": ""}, []), *deltas]
    for number, (delta, ids) in enumerate(parts):
        sampled += len(ids)
        ends = finish if number == len(parts) - 1 else None
        choice = {"index": 0, "delta": delta, "logprobs": _logprobs(ids), "finish_reason": ends}
        yield f"data: {json.dumps(head | {'choices': [choice], 'usage': _usage(len(prompt), sampled)})}\n\n"
        head.pop("prompt_token_ids", None)
    yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(len(prompt), sampled)})}\n\n"
    yield "data: [DONE]\n\n"


def _message(said: Said) -> dict[str, Any]:
    made = [
        {"id": _call_id(index), "type": "function", "function": _function(call)}
        for index, call in enumerate(said.calls)
    ]
    return {"role": "assistant", "content": said.text, "reasoning": said.reasoning or None, "tool_calls": made}


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}


def _call_id(index: int) -> str:
    return f"chatcmpl-tool-{time.time_ns()}-{index}"


def _logprobs(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": f"token_id:{i}", "logprob": LOGPROB, "bytes": [], "top_logprobs": []} for i in ids]}


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a template: its text as a string, the arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    made = message | {"content": content or "", "reasoning_content": message.get("reasoning")}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_with_object(call["function"]) for call in calls]
    return made


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function | {"arguments": json.loads(function["arguments"])}}
