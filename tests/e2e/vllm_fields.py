"""What each field of vLLM's requests does to an answer of the tiny model, on each route that has it.

`tests/unit/chat/test_vllm_fields.py` compares the names with the fields of the installed vLLM. This module imports
neither vLLM nor an SDK.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from skyrl.chat.openai.fields import SamplingParams

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
END = 2
"""The id of the tiny model's end token, <|im_end|>."""
HOT: dict[str, Any] = {"temperature": 2.0, "seed": 1}
SAID: list[Any] = [{"role": "user", "content": "Where is the fox?"}, {"role": "assistant", "content": "The old"}]
CONTINUED = {"messages": SAID, "continue_final_message": True, "add_generation_prompt": False}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7], "return_token_ids": True},
    CHAT: {"messages": SAID[:1], "return_token_ids": True},
    GENERATE: {"token_ids": [5, 6, 7], "output_mode": "text"},
}


@dataclass
class Asker:
    """Asks one route for 12 greedy tokens, unless fields say otherwise."""

    url: str
    path: str
    model: str = "tiny"

    def post(self, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "max_tokens": 12, "temperature": 0} | BASES[self.path] | fields
        if self.path == GENERATE:
            names = SamplingParams.__struct_fields__
            params = {name: value for name, value in body.items() if name in names}
            body = {name: value for name, value in body.items() if name not in names} | {"sampling_params": params}
        key = {"Authorization": "Bearer tml-fields"}
        return httpx.post(self.url + self.path, json=body, headers=key, timeout=120, trust_env=False)

    def whole(self, **fields: Any) -> dict[str, Any]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def choice(self, **fields: Any) -> dict[str, Any]:
        return self.whole(**fields)["choices"][0]

    def ids(self, **fields: Any) -> list[int]:
        return self.choice(**fields)["token_ids"]

    def text(self, **fields: Any) -> str:
        choice = self.choice(**fields)
        return choice["text"] if "text" in choice else choice["message"]["content"] or ""

    def prompt(self, **fields: Any) -> list[int]:
        """The ids of the prompt."""
        answer = self.whole(return_token_ids=True, **fields)
        return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]

    def events(self, **fields: Any) -> list[dict[str, Any]]:
        answer = self.post(stream=True, **fields)
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    def logprobs(self, **fields: Any) -> Any:
        asked = {CHAT: {"logprobs": True}}.get(self.path, {"logprobs": 0})
        return self.choice(**(asked | fields))["logprobs"]


Effect = Callable[[Asker], bool]


def _stopped(ask: Asker, **more: Any) -> tuple[str, str, str]:
    """A whole answer, a piece of it, and the answer that stops at the piece."""
    whole = ask.text()
    piece = whole[3:6]
    return whole, piece, ask.text(stop=[piece], **more)


def _tops(ask: Asker, **fields: Any) -> int:
    """How many best tokens the first position has."""
    logprobs = ask.logprobs(**fields)
    return len(logprobs["top_logprobs"][0] if "tokens" in logprobs else logprobs["content"][0]["top_logprobs"])


def _repeats(ask: Asker, **fields: Any) -> list[int]:
    return ask.ids(max_tokens=40, ignore_eos=True, **fields)


def _on_end(ask: Asker, **fields: Any) -> list[int]:
    """Tokens of an answer that wants nothing but to end."""
    return ask.ids(logit_bias={str(END): 100}, **fields)


def _special(ask: Asker, **fields: Any) -> str:
    return ask.text(logit_bias={str(END): 100}, ignore_eos=True, max_tokens=2, **fields)


SAMPLING: dict[str, Effect] = {
    "n": lambda ask: len(ask.whole(n=3, **HOT)["choices"]) == 3,
    "max_tokens": lambda ask: len(ask.ids(max_tokens=2)) == 2,
    "stop": lambda ask: (found := _stopped(ask))[2] == found[0].partition(found[1])[0],
    "seed": lambda ask: (
        ask.ids(**HOT) == ask.ids(**HOT) and len({tuple(ask.ids(**HOT | {"seed": seed})) for seed in range(4)}) > 1
    ),
    "temperature": lambda ask: ask.ids(**HOT) != ask.ids() == ask.ids(),
    "top_p": lambda ask: ask.ids(top_p=1e-6, **HOT) == ask.ids() != ask.ids(**HOT),
    "top_k": lambda ask: ask.ids(top_k=1, **HOT) == ask.ids() != ask.ids(**HOT),
    "min_p": lambda ask: ask.ids(min_p=1.0, **HOT) == ask.ids() != ask.ids(**HOT),
    "frequency_penalty": lambda ask: _repeats(ask, frequency_penalty=2.0) != _repeats(ask),
    "presence_penalty": lambda ask: _repeats(ask, presence_penalty=2.0) != _repeats(ask),
    "repetition_penalty": lambda ask: _repeats(ask, repetition_penalty=5.0) != _repeats(ask),
    "logit_bias": lambda ask: ask.ids(logit_bias={"7": 100}) == [7] * 12,
    "allowed_token_ids": lambda ask: ask.ids(allowed_token_ids=[7]) == [7] * 12,
    "stop_token_ids": lambda ask: (
        ask.ids(stop_token_ids=[token := ask.ids()[1]]) == ask.ids()[: ask.ids().index(token) + 1]
    ),
    "ignore_eos": lambda ask: (_on_end(ask), _on_end(ask, ignore_eos=True)) == ([END], [END] * 12),
    "min_tokens": lambda ask: END not in _on_end(ask, min_tokens=3)[:3],
    "include_stop_str_in_output": lambda ask: (
        (found := _stopped(ask, include_stop_str_in_output=True))[2] == "".join(found[0].partition(found[1])[:2])
    ),
    "skip_special_tokens": lambda ask: (
        (_special(ask), _special(ask, skip_special_tokens=False)) == ("", "<|im_end|>" * 2)
    ),
    "prompt_logprobs": lambda ask: (
        ((answer := ask.whole(prompt_logprobs=1)).get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"])[1:]
        != []
    ),
    "structured_outputs": lambda ask: ask.text(structured_outputs={"choice": ["heron", "otter"]}) in ("heron", "otter"),
    "stream_interval": lambda ask: len(ask.events(stream_interval=6)) < len(ask.events()),
}
"""Of all routes."""

STREAMED: dict[str, Effect] = {
    "model": lambda ask: ask.post(model="nobody").status_code == 404,
    "stream": lambda ask: (
        sum(len(each["choices"][0].get("token_ids") or ()) for each in ask.events()) == len(ask.ids())
    ),
    "stream_options": lambda ask: "usage" in ask.events(stream_options={"include_usage": True})[-1],
}
COMMON: dict[str, Effect] = {
    "logprob_token_ids": lambda ask: _tops(ask, logprob_token_ids=[7, 9]) == 3,
    "truncate_prompt_tokens": lambda ask: ask.prompt(truncate_prompt_tokens=2) == ask.prompt()[-2:],
    "truncation_side": lambda ask: ask.prompt(truncate_prompt_tokens=2, truncation_side="right") == ask.prompt()[:2],
    "return_token_ids": lambda ask: not ask.choice(return_token_ids=False).get("token_ids"),
    "return_tokens_as_token_ids": lambda ask: "token_id:" in str(ask.logprobs(return_tokens_as_token_ids=True)),
    "response_format": lambda ask: ask.text(response_format={"type": "json_object"}).lstrip().startswith("{"),
}
EFFECTS: dict[str, dict[str, Effect]] = {
    COMPLETIONS: SAMPLING
    | STREAMED
    | COMMON
    | {
        "prompt": lambda ask: ask.prompt(prompt="The old fox") != ask.prompt() == BASES[COMPLETIONS]["prompt"],
        "echo": lambda ask: ask.text(prompt="The old", echo=True, return_token_ids=False).startswith("The old"),
        "logprobs": lambda ask: _tops(ask, logprobs=3) == 3,
    },
    CHAT: SAMPLING
    | STREAMED
    | COMMON
    | {
        "messages": lambda ask: ask.prompt(messages=[SAID[0] | {"content": "Who?"}]) != ask.prompt(),
        "max_completion_tokens": lambda ask: len(ask.ids(max_completion_tokens=2)) == 2,
        "logprobs": lambda ask: len(ask.logprobs()["content"]) == len(ask.ids()),
        "top_logprobs": lambda ask: _tops(ask, top_logprobs=3) == 3,
        "echo": lambda ask: ask.text(**CONTINUED, echo=True).startswith("The old"),
        "add_generation_prompt": lambda ask: len(ask.prompt(add_generation_prompt=False)) < len(ask.prompt()),
        "continue_final_message": lambda ask: ask.prompt(**CONTINUED)[-1] != ask.prompt(messages=SAID)[-1],
        "return_prompt_text": lambda ask: "Where is the fox?" in ask.whole(return_prompt_text=True)["prompt_text"],
    },
    GENERATE: SAMPLING
    | STREAMED
    | {
        "token_ids": lambda ask: ask.ids(token_ids=[300, 330]) != ask.ids(),
        "return_token_ids": lambda ask: ask.prompt() == BASES[GENERATE]["token_ids"],
        "output_mode": lambda ask: "text" not in ask.choice(output_mode="tokens"),
        "logprobs": lambda ask: _tops(ask, output_mode="tokens", logprobs=3) == 3,
    },
}
"""The fields of each route that change an answer of the tiny model."""

_TOOLS = "tests/e2e/tools/test_tools.py::"
ELSEWHERE = {
    "chat_template_kwargs": f"{_TOOLS}test_thinking_is_apart_from_the_text",
    "documents": "tests/component/api/test_openai.py::test_documents_go_on_where_the_template_takes_them",
    "include_reasoning": f"{_TOOLS}test_fields_about_thinking_have_an_effect",
    "parallel_tool_calls": f"{_TOOLS}test_a_second_call_is_made_unless_one_is_asked_for",
    "reasoning_effort": f"{_TOOLS}test_fields_about_thinking_have_an_effect",
    "thinking_token_budget": f"{_TOOLS}test_fields_about_thinking_have_an_effect",
    "tool_choice": f"{_TOOLS}test_a_required_call_is_parsed",
    "tools": f"{_TOOLS}test_a_required_call_is_parsed",
}
"""Fields that the tiny model's own template has no use for, and the tests of their effect."""

NO_EFFECT = {
    "add_special_tokens": "the tiny model's tokenizer adds none; a prompt of ids never gets any",
    "routed_experts_prompt_start": "says which routed experts come back, where vLLM returns any",
    "spaces_between_special_tokens": "vLLM's fast tokenizers write none",
}
"""Fields that go on to vLLM and change nothing here, with the reason."""
