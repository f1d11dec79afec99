"""The released model with a chat template of tools and a token without a row, on a server for full fine-tuning: an
agent's session is what the template writes, the token is refused, and all weights can be trained."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tinker import types
from transformers import AutoTokenizer

from examples.real_model import NAME
from skyrl.cli.demo.server import DemoServer
from tests.e2e.conftest import cross_entropy
from tests.e2e.test_agent_sessions import Agent, agent_of
from tests.real.conftest import KEY, NEAR, TEXT, logprobs_of, real_server
from tests.servers import ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BEYOND = "<beyond>"
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\nEach line is a tool:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one so:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson }}
{{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""With results as messages of their own, which this model tells from calls; it has not been trained on tools."""
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
SHOWN = {"Paris": ("sunny, 21 degrees", "It is sunny in Paris."), "Oslo": ("snow, -3 degrees", "It snows in Oslo.")}
"""Results and answers in the first prompt, from which the model learns to call by itself."""
ASKED = {"Rome": "rain, 12 degrees", "Madrid": "sunny, 30 degrees"}


@pytest.fixture(scope="module")
def altered(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changed = tmp_path_factory.mktemp("altered")
    for file in directory.iterdir():
        if file.name not in ("tokenizer.json", "chat_template.jinja"):
            (changed / file.name).symlink_to(file)
    held = json.loads((directory / "tokenizer.json").read_text())
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    held["added_tokens"].append({**held["added_tokens"][0], "id": rows, "content": BEYOND})
    (changed / "tokenizer.json").write_text(json.dumps(held))
    (changed / "chat_template.jinja").write_text(TEMPLATE)
    return changed


@pytest.fixture(scope="module")
def server(altered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    options = {"trainer.policy.model.lora.rank": 0}
    with ready(real_server(altered, tmp_path_factory.mktemp("server"), **options)) as running:
        yield running


def test_a_token_beyond_the_models_rows_is_refused_and_harms_nobody(server: DemoServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 4, "temperature": 0}
        with pytest.raises(openai.BadRequestError, match="49152"):
            client.chat.completions.create(messages=[{"role": "user", "content": BEYOND}], **asked)
        assert client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **asked).choices
    assert "has 1 token beyond the model's 49,152 rows" in (server.state_dir / "serve.log").read_text()


def question(city: str) -> str:
    return f"What is the weather in {city}?"


def by_openai(agent: Agent) -> None:
    messages: list[Any] = []
    for city, (result, answer) in SHOWN.items():
        function = {"name": "weather", "arguments": json.dumps({"city": city})}
        messages += [
            {"role": "user", "content": question(city)},
            {"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": city, "content": result},
            {"role": "assistant", "content": answer},
        ]
    with agent.openai as client:
        for city, result in ASKED.items():
            messages.append({"role": "user", "content": question(city)})
            said = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": result})
            parts = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True)
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            messages.append({"role": "assistant", "content": text})


def by_anthropic(agent: Agent) -> None:
    tool = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    options: dict[str, Any] = {"model": "any", "tools": [tool], "max_tokens": 40}
    messages: list[Any] = []

    def found(call: str, result: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": result}]}

    for city, (result, answer) in SHOWN.items():
        call = {"type": "tool_use", "id": city, "name": "weather", "input": {"city": city}}
        messages += [
            {"role": "user", "content": question(city)},
            {"role": "assistant", "content": [call]},
            found(city, result),
            {"role": "assistant", "content": answer},
        ]
    with agent.anthropic as client:
        for city, result in ASKED.items():
            messages.append({"role": "user", "content": question(city)})
            with client.messages.stream(messages=messages, **options) as stream:
                said = stream.get_final_message()
            messages += [{"role": "assistant", "content": said.content}, found(said.content[-1].id, result)]
            said = client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": said.content})


@pytest.mark.parametrize("converse", [by_openai, by_anthropic])
def test_an_agents_session_with_tools_is_what_the_template_writes(
    server: DemoServer, altered: Path, reference: Any, converse: Any
) -> None:
    """The rows have the tokens of transformers' rendering of the whole, and transformers' logprobs."""
    with httpx.Client(base_url=server.url, headers={"X-API-Key": KEY}, trust_env=False, timeout=60) as tenant:
        agent = agent_of(tenant, model=NAME, sampling={"temperature": 0, "max_tokens": 40})
        converse(agent)
        turns = agent.turns()
        (row,) = agent.get("/trajectory", format="samples")["rows"]
    assert [turn["fork"] for turn in turns] == [None] * 4
    assert [turn["parent"] for turn in turns] == [None, *(turn["id"] for turn in turns[:-1])]
    messages: list[Any] = []
    for city, (result, answer) in SHOWN.items():
        messages += conversation(city, result, answer)
    for (city, result), told in zip(ASKED.items(), turns[1::2], strict=True):
        assert city in told["answer"]["content"]
        messages += conversation(city, result, told["answer"]["content"])
    tokenizer = AutoTokenizer.from_pretrained(altered)
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert row["tokens"] == tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False)
    sampled = np.flatnonzero(row["loss_mask"])
    assert len(sampled) == sum(len(turn["sampled_tokens"]) for turn in turns) > 60
    places = len(row["tokens"]) - len(row["loss_mask"]) + sampled
    found = np.asarray(row["rollout_log_probs"])[sampled]
    np.testing.assert_allclose(found, logprobs_of(reference, row["tokens"])[places - 1], atol=NEAR)


def conversation(city: str, result: str, answer: str) -> list[dict[str, Any]]:
    """A question, the call that it needs, its result and the answer."""
    function = {"name": "weather", "arguments": {"city": city}}
    return [
        {"role": "user", "content": question(city)},
        {"role": "assistant", "content": "", "tool_calls": [{"id": city, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": city, "content": result},
        {"role": "assistant", "content": answer},
    ]


def test_full_finetuning_is_a_plain_loop_and_each_step_reaches_the_sampler(
    client: Any, tokenizer: Any, reference: Any
) -> None:
    tokens = tokenizer.encode(TEXT)
    step = types.AdamParams(learning_rate=2e-5, beta1=0.9, beta2=0.95, eps=1e-8)
    trainer = client.create_lora_training_client(base_model=NAME, rank=0).result()
    loop = copy.deepcopy(reference)
    adam = torch.optim.Adam(loop.parameters(), lr=2e-5, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(4):
        passed = trainer.forward_backward([cross_entropy(tokens)], "cross_entropy")
        trainer.optim_step(step).result()
        losses.append(passed.result().metrics["loss:sum"])
        logprobs = loop(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        loss = -logprobs.gather(1, torch.tensor(tokens[1:])[:, None]).sum()
        assert losses[-1] == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        adam.step()
        adam.zero_grad()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampled = np.asarray(sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float64)
        output = trainer.forward([cross_entropy(tokens)], "cross_entropy").result().loss_fn_outputs[0]
        assert np.abs(sampled - output["logprobs"].to_numpy()).max() < NEAR
        assert np.abs(sampled - logprobs_of(loop, tokens)).max() < 10 * NEAR
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
