"""What an agent's turn costs before it is sampled: finding its place in the tree, rendering the conversation, and
tokenising what is new.

A conversation of TURNS turns has TOKENS tokens in the end. A turn near its end must cost at most three times what the
second one costs. Beside it: tokenising the whole conversation, as a server does that keeps no tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from benchmarks.stage import Stage
from benchmarks.table import Row, Target
from skyrl.base.tiny import model_path
from skyrl.base.types.agents import AgentTurn, VersionSpan
from skyrl.chat.agents.rendering.continuation import ContinuationTokenizer, Continued, Kept, Step
from skyrl.chat.agents.rendering.loaded_models import load
from skyrl.chat.agents.rendering.renderer import Setting
from skyrl.chat.agents.tree import Tree, request_key

TURNS, TOKENS = 200, 64_000
EARLY, LATE = 2, TURNS
SAMPLED = 60
WORDS_PER_TOKEN = 0.4
ROUNDS, QUICK_ROUNDS = 200, 20
RATIO = 3.0
WORDS = "the river is watched by an old keeper who counts the boats and writes each of them into a book"


def compare(stage: Stage) -> list[Row]:
    """ "direct" is the early turn, and then the whole conversation."""
    model = load(str(model_path())).continuations
    assert model is not None, "the tiny model has a template and a tokenizer"
    rounds = QUICK_ROUNDS if stage.quick else ROUNDS
    tree, kept, early, late = _grown(model)

    def turn_ms(messages: list[dict[str, Any]]) -> float:
        again = msgspec.json.decode(msgspec.json.encode(messages))
        return _milliseconds(
            lambda: _continue(model, tree, kept, again), rounds, before=lambda: tree.place({}, messages[:-2], False)
        )

    early_ms, late_ms = turn_ms(early), turn_ms(late)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    text = "\n".join(message["content"] for message in late)
    whole_ms = _milliseconds(lambda: tokenizer.encode(text).ids, max(3, rounds // 20))
    note = f"{tree.tokens} tokens; placed, with the tail and all token ids"
    bound = Target(RATIO * early_ms)
    return [
        Row(
            "agent-tokenising",
            f"turn {LATE} of an agent beside turn {EARLY}",
            "ms",
            late_ms,
            bound,
            early_ms,
            note=note,
        ),
        Row("agent-tokenising-whole", f"turn {LATE} beside tokenising all", "ms", late_ms, None, whole_ms),
    ]


def _grown(model: ContinuationTokenizer) -> tuple[Tree, Kept, list[dict[str, Any]], list[dict[str, Any]]]:
    """A session with all its turns but the last, what it remembers of its renderings, and the messages of the early and
    of the late turn."""
    tree, kept, messages, early = Tree(), Kept(), list[dict[str, Any]](), list[dict[str, Any]]()
    words, size = WORDS.split(), int(WORDS_PER_TOKEN * (TOKENS / TURNS - SAMPLED))
    for number in range(1, TURNS + 1):
        text = " ".join(words[(number + at) % len(words)] for at in range(size))
        messages.append({"role": "user", "content": f"{number}: {text}"})
        if number == EARLY:
            early = list(messages)
        if number == TURNS:
            break
        answer = {"role": "assistant", "content": f"answer {number}"}
        tree.add(_turn(model, tree, kept, messages, answer), False)
        messages.append(answer)
    return tree, kept, early, messages


def _continue(
    model: ContinuationTokenizer, tree: Tree, kept: Kept, messages: list[dict[str, Any]]
) -> tuple[AgentTurn | None, np.ndarray, bytes]:
    """A request's parent, its prompt's token ids, and its key."""
    place = tree.place({}, messages, False)
    key = request_key(place.prefix, {})
    if place.parent is None:
        return None, np.arange(TOKENS // TURNS, dtype=np.int32), key
    path = tree.path(place.parent)
    step = Step(
        id=place.parent.id,
        next_id=f"t{len(path)}",
        before=tree.messages_of(place.parent),
        said=[True] * (len(path) - 1),
        answer=place.parent.answer,
        new=place.new,
        prompt=place.parent.added[:0],
        sampled=place.parent.sampled,
        setting=Setting(),
        keep=False,
    )
    done = model.continued(step, kept)
    assert isinstance(done, Continued), "the tiny model's template goes on"
    return place.parent, np.concatenate([tree.tokens_of(place.parent), np.array(done.ids, np.int32)]), key


def _turn(
    model: ContinuationTokenizer, tree: Tree, kept: Kept, messages: list[dict[str, Any]], answer: dict[str, Any]
) -> AgentTurn:
    parent, tokens, key = _continue(model, tree, kept, messages)
    return AgentTurn(
        id=f"t{len(tree)}",
        session_id="s",
        parent=None if parent is None else parent.id,
        key=key,
        attempt=0,
        messages=messages[-1:],
        setting={},
        added=tokens[0 if parent is None else tree.length(parent) :],
        sampled=np.arange(SAMPLED, dtype=np.int32),
        logprobs=np.zeros(SAMPLED, np.float32),
        versions=(VersionSpan(0, "base"),),
        answer=answer,
        finish_reason="stop",
        stop_reason=None,
        usage={"prompt": len(tokens), "cached": 0, "sampled": SAMPLED},
        dialect="chat",
        created_at=0.0,
        ended_at=0.0,
    )


def _milliseconds(call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> float:
    """The median time of a call, with `before` called before each."""
    taken = []
    for _ in range(rounds):
        before()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)
