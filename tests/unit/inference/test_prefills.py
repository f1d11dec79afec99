"""vLLM's own scheduler with the plugin's turns of long prompts and answers, on a clock of the test. No model runs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from test_shared_tails import World

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, for what vLLM imports
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from skyrl.inference.vllm_plugin import prefills
    from skyrl.inference.vllm_plugin.prefills import Debts, take_turns, tenant_of
    from skyrl.inference.vllm_plugin.protocol import TENANT_TAGS
    from skyrl.inference.vllm_plugin.waits import waits_of

ANSWER, PROMPT = 1.0, 5.0
"""Seconds of a step of answers alone, and of one with a long prompt."""
_is_patched = False


class Turns(World):
    """Prompts of 40 tokens are long. Of those of 240 one fits into a step, whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(200)
        global _is_patched
        if not _is_patched:
            take_turns()
            _is_patched = True
        monkeypatch.setattr(prefills, "LONG_TOKENS", 40)
        monkeypatch.setattr(self.scheduler.scheduler_config, "enable_chunked_prefill", False)
        self.scheduler.max_num_scheduled_tokens = 300
        self.now = 0.0
        self.scheduler.skyrl_debts = Debts(lambda: self.now)  # type: ignore[attr-defined]

    def ask(self, name: str, adapter: str | None, prompt: int, tokens: int = 8, of: str = "") -> None:
        """`of`: another request with the same prompt."""
        lora = None if adapter is None else LoRARequest(adapter, 1 + sum(map(ord, adapter)), "/nowhere")
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        first = 1 + sum(map(ord, of or name))  # so that no prompt is in the cache
        ids = [first] + [number % 500 for number in range(prompt - 1)]
        self.scheduler.add_request(Request(name, ids, params, None, lora_request=lora, block_hasher=self._hasher))

    def steps(self, count: int) -> list[set[str]]:
        """For each step: the requests whose prompts it computes."""
        found = []
        for _ in range(count):
            output: Any = self.scheduler.schedule()
            prompts = {name for name, tokens in output.num_scheduled_tokens.items() if tokens > 1}
            self.now += PROMPT if any(output.num_scheduled_tokens[name] >= 40 for name in prompts) else ANSWER
            self.update(output)
            found.append(prompts)
        return found


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch)


def test_long_prompts_take_every_other_second_from_the_answers_of_another_tenant(turns: Turns) -> None:
    turns.ask("answer", "b@1", 10, tokens=40)
    turns.steps(1)
    for number in range(3):
        turns.ask(f"long {number}", "a@1", 240)
    expected = [{"long 0"}, *[set()] * 5, {"long 1"}, *[set()] * 5, {"long 2"}]
    assert turns.steps(2) == expected[:2]
    assert waits_of(turns.scheduler) == {"turn": 2}
    assert turns.steps(11) == expected[2:]


def test_the_other_samples_of_a_prompt_do_not_wait_once_it_is_computed(turns: Turns) -> None:
    turns.ask("answer", "b@1", 10, tokens=40)
    turns.steps(1)
    for name in ("long", "same"):
        turns.ask(name, "a@1", 240, of="long")
    turns.ask("other", "a@1", 240)
    assert turns.steps(7) == [{"long"}, set(), *[set()] * 4, {"other"}]
    assert turns.scheduler.requests["same"].num_output_tokens == 6


def test_nobody_waits_for_answers_of_the_own_tenant(turns: Turns) -> None:
    turns.ask("answer", "a@1", 10, tokens=40)
    turns.steps(1)
    for number in range(3):
        turns.ask(f"long {number}", "a@2", 240)
    assert turns.steps(3) == [{"long 0"}, {"long 1"}, {"long 2"}]


def test_a_debt_holds_nothing_back_where_no_answer_runs(turns: Turns) -> None:
    for number in range(3):
        turns.ask(f"long {number}", "a@1", 240, tokens=1)
    assert turns.steps(3) == [{"long 0"}, {"long 1"}, {"long 2"}]


def test_prompts_that_ran_alone_are_not_owed_to_tenants_that_come_later(turns: Turns) -> None:
    for number in range(3):
        turns.ask(f"long {number}", "a@1", 240, tokens=1)
    turns.steps(3)
    turns.ask("answer", "b@1", 10, tokens=40)
    turns.steps(1)
    turns.ask("long 3", "a@1", 240)
    assert turns.steps(1) == [{"long 3"}]


def test_guessed_tokens_of_answers_are_no_prompt() -> None:
    """A hundred answers of four tokens in each step would otherwise owe for ever."""
    params = SamplingParams(max_tokens=1)
    requests = {name: Request(name, [1], params, None) for name in ("guessed", "prompt")}
    output = SimpleNamespace(
        num_scheduled_tokens={"guessed": 4, "prompt": 40}, scheduled_spec_decode_tokens={"guessed": [1, 2, 3]}
    )
    assert prefills.prompt_tokens(output, requests) == {"": 40}


def test_a_debt_is_bounded_and_paid_while_nothing_runs() -> None:
    now = 100.0
    debts = Debts(lambda: now)
    debts.begin({"a": prefills.LONG_TOKENS})
    now += 2 * prefills.MOST_OWED_S
    debts.end()
    assert debts.owes("a")
    now += prefills.MOST_OWED_S
    debts.begin({})
    debts.end()
    assert not debts.owes("a")


def test_a_debt_is_of_its_tenant_alone(turns: Turns) -> None:
    turns.ask("answer", None, 10, tokens=40)
    turns.steps(1)
    turns.ask("long 0", "a@1", 240)
    turns.ask("long 1", "a@1", 240)
    turns.steps(1)
    turns.ask("short", "c@1", 10)
    turns.ask("other", "d@1", 240)
    assert turns.steps(1) == [{"short", "other"}], "the prompts of tenants without a debt"


def test_with_very_many_waiting_requests_none_is_held_back(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    turns.ask("answer", "b@1", 10, tokens=40)
    turns.steps(1)
    monkeypatch.setattr(prefills, "MOST_WAITING", 1)
    for number in range(3):
        turns.ask(f"long {number}", "a@1", 240)
    assert turns.steps(3) == [{"long 0"}, {"long 1"}, set()]


def test_steps_that_are_planned_ahead_count_from_the_end_of_the_step_before() -> None:
    now = 0.0
    debts = Debts(lambda: now)
    debts.begin({"a": prefills.LONG_TOKENS})
    debts.begin({})
    now = 5.0
    debts.end()
    assert debts.owes("a")
    debts.begin({})
    now = 9.0
    debts.end()
    assert debts.owes("a"), "4 of 5 seconds are paid"
    now = 10.0
    debts.end()
    assert not debts.owes("a")


def test_a_tenant_is_the_tag_in_its_priority_or_the_model_of_its_adapter() -> None:
    params = SamplingParams(max_tokens=1)
    lora = LoRARequest("s:train:0@7", 1, "/nowhere")
    first, second, other = (
        tenant_of(Request("r", [1], params, None, lora_request=lora, priority=time * TENANT_TAGS + tag))
        for time, tag in ((5, 7), (900, 7), (5, 8))
    )
    assert first == second != other


def test_without_a_priority_a_tenant_is_the_model_of_its_adapter() -> None:
    params = SamplingParams(max_tokens=1)
    for name, tenant in (("s:train:0@7", "s:train:0"), ("uploaded", "uploaded"), (None, "")):
        lora = None if name is None else LoRARequest(name, 1, "/nowhere")
        assert tenant_of(Request("r", [1], params, None, lora_request=lora)) == tenant
