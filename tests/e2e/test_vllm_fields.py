"""Each field of vLLM's requests that is accepted changes an answer, on the real vLLM."""

from __future__ import annotations

import pytest

from skyrl.cli.demo.server import DemoServer

from .vllm_fields import CHAT, COMPLETIONS, EFFECTS, GENERATE, Asker

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in EFFECTS.items() for field in fields])
def test_an_accepted_field_has_an_effect(server: DemoServer, path: str, field: str) -> None:
    assert EFFECTS[path][field](Asker(server.url, path))


def test_what_vllm_takes_and_does_not_honour_is_refused(server: DemoServer) -> None:
    """vLLM 0.32 answers each of them with 200."""
    for path, fields, named in (
        (COMPLETIONS, {"bad_words": ["goat"]}, "bad_words"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (CHAT, {"bad_words": ["goat"]}, "bad_words"),
        (CHAT, {"documents": [{"title": "a", "text": "b"}]}, "documents"),
        (GENERATE, {"prompt_logprobs": 0, "stream": True}, "sampling_params.prompt_logprobs"),
    ):
        answer = Asker(server.url, path).post(**fields)
        assert answer.status_code == 400, fields
        assert answer.json()["error"]["param"] == named


def test_a_budget_for_thoughts_is_refused_where_the_model_has_none(server: DemoServer) -> None:
    for path in EFFECTS:
        assert Asker(server.url, path).post(thinking_token_budget=1).status_code == 400
