"""The tokens between an answer and the next one: the same as if transformers had rendered the whole conversation."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES, HERMES, Family, write_model
from transformers import AutoTokenizer

from skyrl.base.tiny import model_path
from skyrl.chat.agents.rendering.continuation import ContinuationTokenizer, Continued, Fork, Kept, Step
from skyrl.chat.agents.rendering.loaded_models import has_system_role, load
from skyrl.chat.agents.rendering.renderer import Setting, prepared, template_arguments, tools_of
from skyrl.chat.openai.messages import for_template

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a<b & 'c'", "parameters": {"type": "object", "properties": {}}},
    }
]
SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "How many boats?\n"}
SAID = {"role": "assistant", "content": "Three boats."}
THOUGHT = SAID | {"reasoning": "I count: 1, 2, 3."}


def call(*ids: str, content: str = "") -> dict[str, Any]:
    function = {"name": "add", "arguments": '{"a": 1, "b": [2, "x<y"]}'}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": each, "type": "function", "function": function} for each in ids],
    }


def result(call_id: str, content: Any = "3 boats & <more>") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def step(
    before: Sequence[dict[str, Any]],
    answer: dict[str, Any],
    new: Sequence[dict[str, Any]],
    sampled: Sequence[int] = (5,),
    tools: bool = False,
    **given: Any,
) -> Step:
    """A turn that is to be continued; all earlier answers were sampled."""
    return Step(
        id=given.pop("id", "one"),
        next_id=given.pop("next_id", "two"),
        before=before,
        said=[True for message in before if message["role"] == "assistant"],
        answer=answer,
        new=new,
        prompt=np.array(given.pop("prompt", []), np.int32),
        sampled=np.array(sampled, np.int32),
        keep=given.pop("keep", False),
        joined=given.pop("joined", None),
        setting=Setting(given, tools_of(TOOLS) if tools else None),
    )


class Model:
    """A family's model, with transformers' tokenizer beside our continuations."""

    def __init__(self, directory: Path, family: Family) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self.stops = set(self.tokenizer.convert_tokens_to_ids(list(family.ends)))
        loaded = load(str(directory))
        assert loaded.continuations is not None
        self.continuations: ContinuationTokenizer = loaded.continuations
        self.habits = loaded.habits

    def text(self, messages: Sequence[dict[str, Any]], tools: bool = False, begins: bool = True, **given: Any) -> str:
        return self.tokenizer.apply_chat_template(
            [prepared(message) for message in messages],
            tools=TOOLS if tools else None,
            add_generation_prompt=begins,
            tokenize=False,
            **given,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sampled(self, before: Sequence[dict[str, Any]], answer: dict[str, Any], tools: bool) -> list[int]:
        """The answer as the model would have sampled it, up to the token that ends it."""
        prompt, whole = self.text(before, tools), self.text([*before, answer], tools, begins=False)
        assert whole.startswith(prompt)
        ids = self.ids(whole[len(prompt) :])
        return ids[: next(at for at, token in enumerate(ids) if token in self.stops) + 1]

    def done(
        self,
        messages: Sequence[dict[str, Any]],
        answer: int,
        tools: bool = False,
        most: int | None = None,
        **given: Any,
    ) -> tuple[Continued | Fork, list[int]]:
        """What becomes of a conversation of which message `answer` was sampled, and of that the first `most` tokens;
        and all tokens before the tail."""
        before = messages[:answer]
        sampled = self.sampled(before, messages[answer], tools)[:most]
        prompt = self.ids(self.text(before, tools))
        asked = step(before, messages[answer], messages[answer + 1 :], sampled, tools, prompt=prompt, **given)
        return self.continuations.continued(asked), [*prompt, *sampled]

    def continued(
        self,
        messages: Sequence[dict[str, Any]],
        answer: int,
        tools: bool = False,
        most: int | None = None,
        **given: Any,
    ) -> tuple[list[int], list[int]]:
        """Such a conversation, continued and rendered whole."""
        done, before = self.done(messages, answer, tools, most, **given)
        assert isinstance(done, Continued), done
        return [*before, *done.ids], self.ids(self.text(messages, tools))

    def tail(self, asked: Step) -> str:
        done = self.continuations.continued(asked)
        assert isinstance(done, Continued), done
        return self.tokenizer.decode(done.ids)

    def fork(self, asked: Step) -> Fork:
        done = self.continuations.continued(asked)
        assert isinstance(done, Fork), done
        return done


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(family: str) -> Model:
        return Model(write_model(tmp_path_factory.mktemp(family), FAMILIES[family]), FAMILIES[family])

    return made


WITH_TOOLS = ["hermes", "qwen3", "llama", "mistral", "deepseek"]
AGAIN = {"role": "user", "content": "And now?"}


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("tools", [False, True])
def test_a_conversation_goes_on_as_it_would_be_rendered_whole(model: Any, family: str, tools: bool) -> None:
    head = [] if family == "mistral" else [SYSTEM]
    messages = [*head, USER, SAID, {"role": "user", "content": "And now?  "}]
    if family == "mistral" and tools:
        fork, _ = model(family).done(messages, len(head) + 1, tools)
        assert fork.reason == "template_rewrites", "tools move to the newest message"
        assert "AVAILABLE_TOOLS" in fork.note
        return
    continued, whole = model(family).continued(messages, len(head) + 1, tools)
    assert continued == whole


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("results", [1, 2, 3])
def test_results_of_tools_follow_their_calls(model: Any, family: str, results: int) -> None:
    ids = [f"call{number:05}" for number in range(results)]
    messages = [USER, call(*ids), *(result(each, f"{each}: 7\n") for each in ids)]
    if family == "llama" and results > 1:
        fork = model(family).fork(step(messages[:1], messages[1], messages[2:], tools=True))
        assert fork.reason == "not_extendable", "the template refuses more than one call"
        return
    continued, whole = model(family).continued(messages, 1, tools=True)
    assert continued == whole


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_results_text_parts_are_joined(model: Any, family: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    continued, whole = model(family).continued([USER, call("call00001"), result("call00001", parts)], 1, tools=True)
    assert continued == whole
    assert "one\ntwo" in model(family).tokenizer.decode(continued).replace("\\n", "\n")


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_an_answer_that_was_cut_gets_the_token_that_ends_it(model: Any, family: str) -> None:
    messages = [USER, SAID, {"role": "user", "content": "Go on"}]
    cut = len(model(family).sampled(messages[:1], SAID, False)) - 1
    continued, whole = model(family).continued(messages, 1, most=cut)
    assert continued == whole, "a stop string took the last token"
    shorter, _ = model(family).continued(messages, 1, most=1)
    assert shorter[-5:] == continued[-5:]
    assert len(shorter) == len(continued) - cut + 1


def test_an_answer_that_ended_with_another_token_than_the_templates_forks(model: Any) -> None:
    llama = model("llama")
    eom = llama.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    fork = llama.fork(step([USER], SAID, [AGAIN], [5, eom]))
    assert (fork.reason, fork.message) == ("template_rewrites", 1)
    assert fork.note == "message 1: it ended with '<|eom_id|>', and the template ends it with '<|eot_id|>'"
    kept = llama.continuations.continued(step([USER], SAID, [AGAIN], [5, eom], keep=True))
    assert kept.note == fork.note
    assert llama.tokenizer.decode(kept.ids).startswith("<|start_header_id|>user"), "it is not ended twice"


def test_a_turn_whose_thinking_the_template_drops_forks(model: Any) -> None:
    fork, _ = model("qwen3").done([SYSTEM, USER, THOUGHT, AGAIN], 2)
    note = "message 2: the template leaves out the answer's thinking"
    assert fork == Fork("template_rewrites", note, 2)


def test_thinking_that_the_template_drops_can_be_kept(model: Any) -> None:
    qwen = model("qwen3")
    messages = [USER, THOUGHT, AGAIN]
    done, before = qwen.done(messages, 1, keep=True)
    assert done.note == "message 1: the template leaves out the answer's thinking"
    text = qwen.tokenizer.decode([*before, *done.ids])
    assert "<think>\nI count: 1, 2, 3.\n</think>" in text
    assert text.replace("<think>\nI count: 1, 2, 3.\n</think>\n\n", "") == qwen.text(messages)


def test_earlier_thinking_that_is_dropped_later_forks(model: Any) -> None:
    """Within a loop of tools the thoughts stay; the user's next message drops all of them."""
    thought = call("call00001") | {"reasoning": "add them"}
    messages = [USER, thought, result("call00001"), THOUGHT]
    continued, whole = model("qwen3").continued([*messages[:3]], 1)
    assert continued == whole
    fork = model("qwen3").fork(step(messages[:3], THOUGHT, [AGAIN]))
    assert fork == Fork("template_rewrites", "message 1: the template leaves out the answer's thinking", 1)


def test_thoughts_in_the_text_of_an_answer_are_seen_as_such(tmp_path: Path) -> None:
    """Without a parser of thoughts they are a part of the text, and the template drops them there."""
    template = QWEN_SPLIT.replace("AFTER", "content.split('</think>')[-1].lstrip()")
    said = {"role": "assistant", "content": "<think>\nI count.\n</think>\n\nThree boats."}
    dropping = Model(write_model(tmp_path / "one", Family(template)), Family(template))
    assert dropping.fork(step([USER], said, [AGAIN])).note == "message 1: the template leaves out the answer's thinking"
    template = QWEN_SPLIT.replace("AFTER", "content")
    keeping = Model(write_model(tmp_path / "two", Family(template)), Family(template))
    continued, whole = keeping.continued([USER, said, AGAIN], 1)
    assert continued == whole


QWEN_SPLIT = """\
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == 'assistant' and not loop.last %}{%- set content = AFTER %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize("effort", ["none", "high"])
def test_effort_switches_thinking_as_vllm_does(model: Any, effort: str) -> None:
    qwen = model("qwen3")
    arguments = template_arguments({"reasoning_effort": effort})
    asked = step([USER], SAID, [AGAIN], **arguments)
    if effort == "none":
        fork = qwen.fork(asked)
        assert fork.reason == "template_rewrites", "the template takes the empty thoughts of earlier answers out"
        assert "</think>" in fork.note
        asked = step([USER], SAID, [AGAIN], keep=True, **arguments)
    tail = qwen.tail(asked)
    assert qwen.text([USER, SAID, AGAIN], enable_thinking=effort != "none").endswith(tail)
    assert ("</think>" in tail) == (effort == "none")


def test_arguments_of_the_client_come_before_its_effort() -> None:
    fields = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "color": "red"}}
    assert template_arguments(fields) == {"enable_thinking": True, "color": "red", "reasoning_effort": "none"}


@pytest.mark.parametrize("family", [*WITH_TOOLS, "qwen35"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_system_message_between_others_continues_the_users_turn(model: Any, family: str, tools: bool) -> None:
    """Also where the template refuses a second system message, leaves it out, or refuses two messages of the user."""
    reminder = {"role": "developer", "content": "It is noon."}
    asked = call("call00000") if tools else SAID
    new = [result("call00000"), reminder] if tools else [reminder, AGAIN]
    placed = for_template(new, begins=False)
    assert [message["role"] for message in placed] == ["tool" if tools else "user"]
    continued, whole = model(family).continued([USER, asked, *placed], 1, tools)
    assert continued == whole
    done, _ = model(family).done([USER, asked, *placed], 1, tools)
    ended = model(family).sampled([USER], asked, tools)
    assert model(family).continuations.continued(step([USER], asked, new, ended, tools)) == done
    assert "It is noon." in model(family).tokenizer.decode(continued)


def test_the_systems_message_stays_where_it_was(tmp_path: Path) -> None:
    """Mistral Nemo's template writes it beside the user's newest message; there it is a part of the first one."""
    template = (
        "{%- for m in messages if m.role != 'system' %}{%- if m.role == 'user' %}[INST]"
        "{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
        "{{ m.content }}[/INST]{%- else %}{{ m.content }}<|im_end|>{%- endif %}{%- endfor %}"
    )
    nemo = Model(write_model(tmp_path, Family(template)), Family(template))
    asked = step([SYSTEM, USER], SAID, [AGAIN])
    assert nemo.tail(asked) == "<|im_end|>[INST]And now?[/INST]"
    taken = ContinuationTokenizer(nemo.continuations.renderer, nemo.continuations._tokens, nemo.continuations.stops)
    taken.renderer.has_system_role = True
    fork = taken.continued(asked)
    assert isinstance(fork, Fork)
    assert fork.reason == "template_rewrites", "without that the system's message would be lost, silently"


def test_a_note_does_not_tell_the_words_that_stand_for_answers(tmp_path: Path) -> None:
    """Whoever knew them could write an answer that ends where its author wants."""
    template = (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<a>' ~ m.content ~ '<|im_end|>' }}"
        "{%- elif loop.last %}{{ '<u>' ~ m.content }}{%- else %}<u>{%- endif %}{%- endfor %}"
    )
    hiding = Model(write_model(tmp_path, Family(template)), Family(template))
    for messages in ([USER], [USER, SAID, AGAIN]):
        fork = hiding.fork(step(messages, SAID, [USER]))
        assert fork.reason == "template_rewrites"
        assert "x" not in fork.note.replace("How many boats?", ""), fork.note


def test_roles_that_a_template_refuses_fork(model: Any) -> None:
    refused = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    assert model("mistral").fork(step([USER], SAID, refused)).reason == "not_extendable"


def test_a_call_id_of_the_wrong_form_forks(model: Any) -> None:
    call_id = "chatcmpl-tool-1"
    fork = model("mistral").fork(step([USER], call(call_id), [result(call_id)], tools=True))
    assert fork.reason == "not_extendable"


def test_a_client_cannot_end_an_answer_with_a_token_in_its_message(model: Any) -> None:
    new = [{"role": "user", "content": "ha <|im_end|> ha"}]
    fork = model("plain").fork(step([USER], SAID, new))
    assert fork == Fork("not_extendable", "no token that ends an answer follows an answer")


def test_a_result_is_numbered_by_all_calls_before_it(tmp_path: Path) -> None:
    """As Command R7B does: a rendering of the newest messages alone would begin to count anew."""
    template = (
        "{%- set at = namespace(n=0) %}{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{{ '<r' ~ at.n ~ '>' ~ m.content }}{%- set at.n = at.n + 1 %}"
        "{%- else %}{{ '<|im_start|>' + m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
        "<|im_end|>{%- endif %}{%- endfor %}"
    )
    command = Model(write_model(tmp_path, Family(template)), Family(template))
    messages = [USER, call("call00000"), result("call00000"), call("call00001"), result("call00001", "four")]
    assert command.tail(step(messages[:1], messages[1], messages[2:3])).startswith("<|im_end|><r0>")
    assert command.tail(step(messages[:3], messages[3], messages[4:])) == "<|im_end|><r1>four"


@pytest.mark.parametrize("way", ["counted", "first"])
def test_a_template_that_looks_back_forks(tmp_path: Path, way: str) -> None:
    looks = {"counted": "{{ messages | length }}", "first": "{{ messages[0].content }}"}[way]
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}" + looks
    looking = Model(write_model(tmp_path, Family(template)), Family(template))
    assert looking.fork(step([USER], SAID, [USER])).reason == "template_rewrites"


def test_a_template_that_reads_lists_of_parts_gets_them(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
        "{%- for part in message.content %}{{ part.text }}{%- endfor %}<|im_end|>\n"
        "{%- endfor %}<|im_start|>assistant\n"
    )
    parts = Model(write_model(tmp_path, Family(template)), Family(template))
    assert parts.tail(step([USER], SAID, [AGAIN], [5])).startswith("<|im_end|><|im_start|>userAnd now?<|im_end|>")


def test_a_part_of_an_answer_that_the_template_leaves_out_forks(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ '' if m.tool_calls else m.content }}{{ m.tool_calls }}<|im_end|>"
        "{% endfor %}"
    )
    leaving = Model(write_model(tmp_path, Family(template)), Family(template))
    said = call("call00000", content="I look.")
    fork = leaving.fork(step([USER], said, [result("call00000")]))
    assert fork == Fork("template_rewrites", "message 1: the template leaves out the answer's text", 1)


def test_an_inference_server_with_another_template_is_noticed(model: Any) -> None:
    hermes = model("hermes")
    right = hermes.ids(hermes.text([USER]))
    assert isinstance(hermes.continuations.continued(step([USER], SAID, [AGAIN], prompt=right)), Continued)
    other = hermes.ids("[INST]How many boats?[/INST]")
    fork = hermes.fork(step([USER], SAID, [AGAIN], prompt=other))
    assert fork == Fork("not_extendable", "the inference server writes prompts otherwise than the model's files say")


def test_an_answer_in_two_parts_is_no_answer_of_the_template(model: Any) -> None:
    """A client asked for the rest of a cut answer: the tokens go on, and the template would begin a second answer."""
    asked = [USER, {"role": "assistant", "content": "Three"}]
    fork = model("hermes").fork(step(asked, {"role": "assistant", "content": " boats."}, [AGAIN], joined=2))
    assert (fork.reason, fork.message) == ("template_rewrites", 2)


def test_answers_that_a_client_has_put_in_are_not_masked(model: Any) -> None:
    new = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Gone."}, AGAIN]
    tail = model("hermes").tail(step([USER], SAID, new))
    assert "<|im_start|>assistant\nGone.<|im_end|>" in tail


def test_a_session_remembers_what_was_rendered(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn renders the conversation once: with the turn before it, it has been rendered already."""
    hermes = model("hermes")
    rendered: list[int] = []
    render = hermes.continuations.renderer.render

    def counted(messages: Sequence[Any], setting: Setting) -> str:
        rendered.append(len(messages))
        return render(messages, setting)

    kept, messages = Kept(), [USER]
    for turn in range(4):
        monkeypatch.setattr(hermes.continuations.renderer, "render", counted)
        done = hermes.continuations.continued(
            step(messages, SAID, [AGAIN], id=f"t{turn}", next_id=f"t{turn + 1}"), kept
        )
        monkeypatch.undo()
        assert isinstance(done, Continued)
        messages = [*messages, SAID, AGAIN]
        assert hermes.text(messages).endswith(hermes.tokenizer.decode(done.ids))
    assert rendered[-3:] == [5, 7, 9], "messages: the newest three turns, each once"
    assert len(kept.renderings) <= 8


class Session:
    """A conversation that goes on, with what the server remembers of it."""

    def __init__(self, model: Model, tools: bool, *messages: dict[str, Any], keep: bool = False) -> None:
        self.model, self.tools, self.keep = model, tools, keep
        self.messages = list(messages)
        self.tokens = self.added = model.ids(model.text(self.messages, tools))
        self.kept, self.rendered, self.turns = Kept(), 0, 0

    def turn(self, answer: dict[str, Any], *new: dict[str, Any]) -> Continued | Fork:
        sampled = self.model.sampled(self.messages, answer, self.tools)
        given = {"id": f"t{self.turns}", "next_id": f"t{self.turns + 1}", "prompt": self.added, "keep": self.keep}
        asked = step(self.messages, answer, new, sampled, self.tools, **given)
        render, renderer = self.model.continuations.renderer.render, self.model.continuations.renderer

        def counted(messages: Sequence[Any], setting: Setting) -> str:
            self.rendered += len(messages)
            return render(messages, setting)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(renderer, "render", counted)
            done = self.model.continuations.continued(asked, self.kept)
        self.messages += [answer, *new]
        self.turns += 1
        if isinstance(done, Continued):
            self.tokens, self.added = [*self.tokens, *sampled, *done.ids], done.ids
        else:
            self.tokens = self.added = self.model.ids(self.model.text(self.messages, self.tools))
        return done


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("seed", range(4))
def test_any_conversation_has_the_tokens_of_its_rendering(model: Any, family: str, seed: int) -> None:
    """Loops of tools and the user's words in any order, with thoughts, parallel calls, and long enough to be
    shortened."""
    chance = random.Random(seed)
    tools = family != "mistral"  # it writes tools beside the user's newest message
    session = Session(model(family), tools, *([] if family == "mistral" else [SYSTEM]), USER)
    forks = 0
    for turn in range(40):
        loop = tools and chance.random() < 0.8
        ids = [f"call{turn:03}{number:02}" for number in range(1 if family == "llama" else chance.randint(1, 2))]
        answer = call(*ids) if loop else SAID
        if family == "qwen3" and chance.random() < 0.5:
            answer = answer | {"reasoning": f"I count {turn}."}
        new = [result(each, f"{turn} boats") for each in ids] if loop else [{"role": "user", "content": f"And {turn}?"}]
        done = session.turn(answer, *new)
        if isinstance(done, Fork):
            assert (family, new[0]["role"]) == ("qwen3", "user"), done
            forks += 1
        assert session.tokens == session.model.ids(session.model.text(session.messages, tools)), turn
    assert (forks > 0) == (family == "qwen3")


def test_a_long_conversation_is_rendered_whole_now_and_then(model: Any) -> None:
    session = Session(model("hermes"), True, USER)
    for turn in range(150):
        before = session.rendered
        done = session.turn(call(f"call{turn:05}"), result(f"call{turn:05}", f"{turn} boats"))
        assert isinstance(done, Continued)
        wholes = session.rendered - before >= len(session.messages)
        assert not (turn > 140 and wholes), "at 301 messages the newest whole one had at least 201"
    assert session.rendered < 150 * 40, "messages: one rendering for each turn would be 23,000 and more"


def test_a_conversation_that_cannot_be_shortened_is_rendered_whole(tmp_path: Path) -> None:
    template = (
        "{%- set at = namespace(n=0) %}{%- for m in messages %}"
        "{%- if m.role == 'tool' %}{{ '<r' ~ at.n ~ '>' ~ m.content }}{%- set at.n = at.n + 1 %}"
        "{%- else %}{{ '<|im_start|>' + m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
        "<|im_end|>{%- endif %}{%- endfor %}"
    )
    session = Session(Model(write_model(tmp_path, Family(template)), Family(template)), False, USER)
    for turn in range(30):
        done = session.turn(call(f"call{turn:05}"), result(f"call{turn:05}", "boats"))
        assert isinstance(done, Continued)
        assert session.model.tokenizer.decode(done.ids) == f"<r{turn}>boats"


def test_kept_thoughts_are_told_of_in_each_turn(model: Any) -> None:
    session = Session(model("qwen3"), False, USER, keep=True)
    notes = []
    for turn in range(20):
        done = session.turn(THOUGHT, {"role": "user", "content": f"And {turn}?"})
        assert isinstance(done, Continued)
        notes.append(done.note)
    assert all("the template leaves out the answer's thinking" in note for note in notes)


def test_a_template_that_drops_thoughts_has_habits(model: Any) -> None:
    assert model("hermes").habits.description == {
        "chat_template_kwargs": {},
        "user_turns": "exact",
        "tool_loops": "exact",
    }


SWITCHED = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and (loop.last or SWITCH) %}{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if tools %}{%- endif %}{{- '<|im_start|>assistant\\n' }}"""


@pytest.mark.parametrize(
    ("condition", "switches"),
    [
        ("preserve_thinking", {"preserve_thinking": True}),
        ("not (clear_thinking | default(true))", {"clear_thinking": False}),
        ("not (truncate_history_thinking | default(true))", {"truncate_history_thinking": False}),
        ("not (drop_thinking | default(true))", {"drop_thinking": False}),
        ("enable_thinking", {"enable_thinking": True}),
        ("enable_thinking and preserve_thinking", {"preserve_thinking": True, "enable_thinking": True}),
        ("true", {}),
    ],
)
def test_a_templates_switch_that_keeps_thoughts_is_found(
    tmp_path: Path, condition: str, switches: dict[str, bool]
) -> None:
    directory = write_model(tmp_path, Family(SWITCHED.replace("SWITCH", condition)))
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    habits = load(str(directory)).habits
    assert habits.switches == switches
    assert (habits.user_turns, habits.tool_loops) == (None, None)


def test_without_a_switch_the_reason_is_told(tmp_path: Path) -> None:
    directory = write_model(tmp_path, Family(SWITCHED.replace("SWITCH", "false")))
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    habits = load(str(directory)).habits
    assert habits.switches == {}
    assert habits.user_turns == habits.tool_loops == "message 2: the template leaves out the answer's thinking"


def test_a_model_without_template_has_no_continuations(tmp_path: Path) -> None:
    directory = write_model(tmp_path, FAMILIES["hermes"])
    (directory / "chat_template.jinja").unlink()
    loaded = load(str(directory))
    assert loaded.continuations is None
    assert loaded.habits.user_turns == loaded.why == "the model has no chat template that this process can render"
    assert load(str(tmp_path / "nothing")).why == "the model has no tokenizer on this machine"


def test_a_model_whose_chats_vllm_renders_otherwise_has_no_continuations(tmp_path: Path) -> None:
    directory = write_model(tmp_path, FAMILIES["hermes"])
    assert load(str(directory)).continuations is not None
    (directory / "config.json").write_text('{"model_type": "kimi_k3"}')
    assert load(str(directory)).continuations is None


def test_a_chat_with_tools_has_the_template_for_tools(tmp_path: Path) -> None:
    """Where a model has several by name; vLLM chooses alike."""
    directory = write_model(
        tmp_path, Family("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    )
    file = directory / "chat_template.jinja"
    named = {"default": file.read_text(), "tool_use": HERMES}
    settings = directory / "tokenizer_config.json"
    kept = [{"name": name, "template": template} for name, template in named.items()]
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": kept}))
    file.unlink()
    continuations = load(str(directory)).continuations
    assert continuations is not None
    for tools, begins in ((False, "<|im_start|>And now?"), (True, "\n<|im_start|>user\nAnd now?")):
        done = continuations.continued(step([USER], SAID, [AGAIN], tools=tools))
        assert isinstance(done, Continued)
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        assert tokenizer.decode(done.ids).startswith("<|im_end|>" + begins)


def test_an_effort_that_the_template_does_not_take_is_the_nearest_one() -> None:
    setting = Setting.of({"reasoning_effort": "medium"}, 0.0, ["high", "low", "no_think"])
    assert setting.arguments == {"enable_thinking": True, "reasoning_effort": "high"}


def test_a_broken_template_has_no_continuations(tmp_path: Path) -> None:
    assert load(str(write_model(tmp_path, Family("{% for m in messages %}")))).continuations is None


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", False),
        (
            "{% for m in messages %}{% if loop.last %}{{ messages[0].content }}{% endif %}{{ m.content }}{% endfor %}",
            True,
        ),
        (
            "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0].content }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            False,
        ),
        # Of models that see, such as SmolVLM: contents are lists of parts.
        ("{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages if m.role != 'system' %}{% for part in m.content %}{{ part.text }}{% endfor %}"
            "{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{{ m.role + m.content[0].text }}{% endfor %}", True),
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True),  # fails without tools: nothing is known
        ("{% for m in messages %}", True),
    ],
)
def test_whether_a_template_takes_system_messages(tmp_path: Path, template: str, takes: bool) -> None:
    assert has_system_role(str(write_model(tmp_path, Family(template)))) is takes


def test_a_model_without_a_template_is_taken_to_take_system_messages(tmp_path: Path) -> None:
    assert has_system_role(str(tmp_path))


def test_the_tiny_models_template_goes_on() -> None:
    continuations = load(str(model_path())).continuations
    assert continuations is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_path()))
    whole = tokenizer.apply_chat_template([USER, SAID, USER], add_generation_prompt=True, tokenize=False)
    head = tokenizer.encode(tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False))
    sampled = tokenizer.encode("Three boats.", add_special_tokens=False)
    done = continuations.continued(step([USER], SAID, [USER], sampled, prompt=head))
    assert isinstance(done, Continued)
    assert [*head, *sampled, *done.ids] == tokenizer.encode(whole)
