"""The radix middleware with the tiny model's tokenizer, in front of a worker that is played."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from skyrl.base.tiny import model_path
from skyrl.router.messages import Message, Receive, Scope, Send
from skyrl.router.middleware import RouterContext
from skyrl.router.radix import RadixTreeMiddleware

EOS = 2  # <|im_end|>


class Worker:
    """Answers each `/generate` with the next of `answers`: (status, body) or a list of chunks of a stream."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes] | list[bytes]] = []
        self.seen: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append((await receive())["body"])
        answer = self.answers.pop(0)
        status, chunks = answer if isinstance(answer, tuple) else (200, answer)
        kind = b"application/json" if isinstance(answer, tuple) else b"text/event-stream"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for chunk in [chunks] if isinstance(chunks, bytes) else chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Router:
    """`stays`: the client stays connected until the worker has answered everything."""

    def __init__(self, *, stays: bool = False, **options: object) -> None:
        self.stays = stays
        self.worker = Worker()
        self.context = RouterContext(tokenizer_dir=model_path(), options={"radix_abort_pause_s": "0", **options})
        self.plugin = RadixTreeMiddleware(self.worker, router=self.context)

    def ids(self, text: str) -> list[int]:
        return self.context.tokenizer.encode(text, add_special_tokens=False).ids

    async def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if self.stays and not unread:
                await asyncio.Event().wait()
            return unread.pop() if unread else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await self.plugin(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def generate(self, text: str, answer: Any, **fields: Any) -> tuple[Any, bytes]:
        """What the worker was sent, and the client's answer."""
        self.worker.answers.append((200, json.dumps(answer).encode()))
        _, body = await self.send("/generate", json.dumps({"text": text, **fields}).encode())
        return json.loads(self.worker.seen[-1]), body

    async def retrieve(self, text: str) -> Any:
        status, body = await self.send("/retrieve_from_text", json.dumps({"text": text}).encode())
        assert status == 200
        return json.loads(body)


def answer(text: str, ids: list[int], kind: str = "length", **meta: Any) -> dict[str, Any]:
    logprobs = [[-0.5 - place, token, None] for place, token in enumerate(ids)]
    finish: dict[str, Any] = {"type": kind, "matched": EOS} if kind == "stop" else {"type": kind}
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "weight_version": "default",
            "output_token_logprobs": logprobs,
            "completion_tokens": len(ids),
            **meta,
        },
    }


@pytest.fixture
def router() -> Router:
    return Router()


async def test_turns_reuse_sampled_tokens_exactly(router: Router) -> None:
    odd = [router.ids(letter)[0] for letter in "india"]  # not what the tokenizer makes of "india"
    assert odd != router.ids("india")
    await router.generate("B ", answer("india", odd))
    sent, _ = await router.generate("B india and", answer("!", router.ids("!")))
    assert sent["input_ids"] == [*router.ids("B "), *odd, *router.ids(" and")]
    got = await router.retrieve("B india and!")
    assert got["tokens"] == [*sent["input_ids"], *router.ids("!")]
    assert got["loss_mask"] == [0] * len(router.ids("B ")) + [1] * 5 + [0] * len(router.ids(" and")) + [1]
    assert got["rollout_logp"][-1] == -0.5
    assert got["response"] == "B india and!"
    assert got["token_length"] == got["loss_mask_length"] == len(got["tokens"])


async def test_a_stop_by_a_token_is_stored_as_a_stop(router: Router) -> None:
    ended = answer("x", [*router.ids("x"), EOS], "stop")
    ended["meta_info"]["finish_reason"]["type"] = "stop_token"
    await router.generate("B ", ended)
    got = await router.retrieve("B x")
    assert got["tokens"] == [*router.ids("B "), *router.ids("x"), EOS]
    assert got["loss_mask"][-2:] == [1, 1]


async def test_a_stored_prompt_does_not_change_another_one(router: Router) -> None:
    await router.generate("B india", answer("x", router.ids("x")))
    sent, _ = await router.generate("B alpha", answer("x", router.ids("x")))
    assert sent["input_ids"] == router.ids("B alpha")
    assert router.plugin.stats()["hits"] == 0


async def test_no_cut_is_made_within_a_character(router: Router) -> None:
    first, second = router.ids("é")
    await router.generate("a", answer("é", [first, second]))
    await router.generate("b", answer("\ufffd", [first]))
    for text, ids in (("aé", [first, second]), ("aè", router.ids("è"))):
        assert (await router.retrieve(text))["tokens"] == [*router.ids("a"), *ids]
    assert (await router.retrieve("b\ufffd"))["tokens"] == [*router.ids("b"), first]


@pytest.mark.parametrize(("shown", "stored"), [("yes", 1), ("yes<|im_end|>", 1), ("no", 0), ("ye", 0)])
async def test_the_end_token_is_retrieved_and_never_sent_twice(router: Router, shown: str, stored: int) -> None:
    ids = [*router.ids("yes"), EOS]
    await router.generate("q ", answer(shown, ids, "stop"))
    assert router.plugin.stats()["entries"] == stored
    if not stored:
        return
    got = await router.retrieve("q " + shown)
    assert (got["tokens"], sum(got["loss_mask"])) == (router.ids("q ") + ids, len(ids))
    sent, _ = await router.generate("q yes<|im_end|>\n", answer("", []))
    assert sent["input_ids"] == [*router.ids("q "), *ids, *router.ids("\n")]
    sent, _ = await router.generate("q yes\n", answer("", []))
    assert sent["input_ids"] == [*router.ids("q "), *router.ids("yes"), *router.ids("\n")]


async def test_a_trimmed_stop_string_is_retrieved(router: Router) -> None:
    ids = router.ids("yes</search>")
    reply = answer("yes", ids, finish_reason={"type": "stop", "matched": "</search>"})
    await router.generate("q ", reply)
    assert (await router.retrieve("q yes"))["tokens"] == router.ids("q ") + ids


async def test_fields_survive_and_the_answer_is_the_workers_bytes(router: Router) -> None:
    reply = answer("x", router.ids("x"), routed_experts="AAAA") | {"strange": [1e-5, None]}
    fields = {"return_routed_experts": True, "custom_params": {"a": [1]}, "return_logprob": False}
    sent, body = await router.generate("a", reply, **fields)
    assert sent == {**fields, "input_ids": router.ids("a"), "return_logprob": True}
    assert body == json.dumps(reply).encode()


@pytest.mark.parametrize(
    "fields", [{"text": ["a"]}, {"text": ""}, {"text": "a", "image_data": "x"}, {"text": "a", "input_ids": [1]}, []]
)
async def test_other_input_is_passed_on_untouched(router: Router, fields: Any) -> None:
    router.worker.answers.append((200, b"not JSON"))
    body = json.dumps(fields).encode()
    assert await router.send("/generate", body) == (200, b"not JSON")
    assert router.worker.seen == [body]


def _broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    reply = answer("ab", [69, 70])
    change(reply)
    return reply


@pytest.mark.parametrize(
    "reply",
    [
        _broken(lambda reply: reply.update(output_ids=[69])),
        _broken(lambda reply: reply.update(text="abc")),
        _broken(lambda reply: reply.update(text=None)),
        _broken(lambda reply: reply["meta_info"]["output_token_logprobs"].pop()),
        _broken(lambda reply: reply["meta_info"]["output_token_logprobs"][0].__setitem__(0, None)),
        _broken(lambda reply: reply["meta_info"]["output_token_logprobs"][0].__setitem__(1, 70)),
        _broken(lambda reply: reply["meta_info"].update(weight_version=1.5)),
        _broken(lambda reply: reply["meta_info"].update(completion_tokens=3)),
        _broken(lambda reply: reply["meta_info"].update(finish_reason=None)),
        _broken(lambda reply: reply.update(output_ids=[69, 10**6])),
        7,
    ],
)
async def test_an_answer_that_does_not_agree_is_not_stored(router: Router, reply: Any) -> None:
    _, body = await router.generate("q", reply)
    assert json.loads(body) == reply
    stats = router.plugin.stats()
    assert (stats["unverified"], stats["entries"]) == (1, 0)
    await router.generate("q", _broken(lambda reply: None))
    assert router.plugin.stats()["entries"] == 1, "the answer that the broken ones come from is stored"


async def test_samples_of_workers_that_count_or_tell_no_version_are_stored() -> None:
    """A number is the version of its text. Samples without a version are of no old one."""
    router = Router(radix_kept_versions="2")
    for number, version in enumerate((None, 1, "1", 2, "3", None)):
        reply = answer("ab", [69, 70], weight_version=version)
        if version is None:
            del reply["meta_info"]["weight_version"]
        await router.generate(f"q{number}", reply)
    stats = router.plugin.stats()
    assert (stats["unverified"], stats["collected"], stats["entries"]) == (0, 2, 4)
    for number, kept in enumerate((True, False, False, True, True, True)):
        assert (1 in (await router.retrieve(f"q{number}ab"))["loss_mask"]) is kept


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_errors_are_passed_on(router: Router, status: int) -> None:
    router.worker.answers.append((status, json.dumps(answer("ab", [69, 70])).encode()))
    assert (await router.send("/generate", b'{"text":"a"}'))[0] == status
    assert router.plugin.stats()["entries"] == 0


async def test_an_aborted_sample_ends_when_the_client_has_left() -> None:
    router = Router(radix_abort_pause_s="60")
    await router.generate("a", answer("b", router.ids("b"), "abort"))
    assert len(router.worker.seen) == 1
    stats = router.plugin.stats()
    assert (stats["aborted"], stats["entries"], stats["unverified"]) == (1, 0, 0)


def _events(router: Router, kind: str) -> list[bytes]:
    parts = [answer("a", router.ids("a")), answer("a b", router.ids("a b"), kind)]
    lines = [b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts]
    stream = b"".join([*lines, b"data: [DONE]\n\n"])
    return [stream[:30], stream[30:-20], stream[-20:]]


@pytest.mark.parametrize(("kind", "entries"), [("length", 1), ("abort", 0)])
async def test_a_stream_is_passed_on_and_its_last_event_is_stored(router: Router, kind: str, entries: int) -> None:
    chunks = _events(router, kind)
    router.worker.answers.append(list(chunks))
    _, body = await router.send("/generate", b'{"text":"q","stream":true}')
    assert body == b"".join(chunks)
    assert json.loads(router.worker.seen[0])["stream"] is True
    assert router.plugin.stats()["entries"] == entries


async def test_a_stream_that_breaks_off_is_not_stored(router: Router) -> None:
    router.worker.answers.append(_events(router, "length")[:2])
    await router.send("/generate", b'{"text":"q","stream":true}')
    assert router.plugin.stats()["entries"] == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"text":""}', b'{"text":7}', b'{"text":"\\ud800"}', b"\xff"])
async def test_bad_input_to_retrieve_is_refused(router: Router, body: bytes) -> None:
    status, reply = await router.send("/retrieve_from_text", body)
    assert status == 400
    assert json.loads(reply)["error"]


async def test_unknown_text_is_tokenised_and_not_stored(router: Router) -> None:
    got = await router.retrieve("B india")
    assert (got["tokens"], set(got["loss_mask"]), set(got["rollout_logp"])) == (router.ids("B india"), {0}, {0.0})
    assert router.plugin.stats()["entries"] == 0


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="radix_kept_versions"):
        Router(radix_kept_versions="0")


@pytest.mark.parametrize(("aborts", "calls", "kind"), [(2, 3, "length"), (9, 6, "abort")])
async def test_an_aborted_sample_is_sent_again(aborts: int, calls: int, kind: str) -> None:
    router = Router(stays=True)
    good, gone = answer("b", router.ids("b")), answer("b", router.ids("b"), "abort")
    router.worker.answers += [(200, json.dumps(one).encode()) for one in [gone] * aborts + [good]]
    _, body = await router.send("/generate", b'{"text":"a"}')
    assert json.loads(body)["meta_info"]["finish_reason"]["type"] == kind
    assert len(router.worker.seen) == calls
    assert len(set(router.worker.seen)) == 1
    assert router.plugin.stats()["entries"] == (kind == "length")


LONG = "some more words, and ☃ " * 4000
"""Above 64 KiB."""


def small_answer(router: Router) -> tuple[int, bytes]:
    return 200, json.dumps(answer("b", router.ids("b"))).encode()


@pytest.mark.parametrize("path", ["/generate", "/retrieve_from_text"])
async def test_another_request_does_not_wait_while_a_long_text_is_tokenised(router: Router, path: str) -> None:
    encode, may_encode = router.plugin.cache._encode, threading.Event()

    def encode_later(text: str) -> list[int]:
        if len(text) > 1000:
            assert may_encode.wait(60), "no other request came"
        return encode(text)

    router.plugin.cache._encode = encode_later
    router.worker.answers += [small_answer(router)] * 2
    long = asyncio.create_task(router.send(path, json.dumps({"text": LONG}).encode()))
    await asyncio.sleep(0)  # it has begun
    assert (await router.generate("a", answer("b", router.ids("b"))))[0]["input_ids"] == router.ids("a")
    assert not long.done()
    may_encode.set()
    assert (await long)[0] == 200


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """A thread that waits for the interpreter gets it at once."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
async def test_other_threads_run_while_a_long_text_is_tokenised(router: Router) -> None:
    encode, began, ended = router.plugin.cache._encode, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def watched(text: str) -> list[int]:
        if len(text) < 1000:
            return encode(text)
        loop.call_soon_threadsafe(began.set)
        try:
            return encode(text)
        finally:
            loop.call_soon_threadsafe(ended.set)

    router.plugin.cache._encode = watched
    router.worker.answers += [small_answer(router)] * 2
    long = asyncio.create_task(router.send("/generate", json.dumps({"text": LONG * 10}).encode()))
    await began.wait()
    others = 0
    while not ended.is_set():
        await router.retrieve("a")
        others += 1
        await asyncio.sleep(0)
    assert others > 1000, "with `encode` of one text some 100 would run, and with this some 10,000"
    await long


async def test_a_long_text_has_the_tokens_of_a_short_one(router: Router) -> None:
    ids = router.ids("yes")
    sent, _ = await router.generate(LONG, answer("yes", ids), input_ids=None, rid="é")
    assert sent == {"input_ids": router.ids(LONG), "return_logprob": True, "rid": "é"}
    for text, rest in ((f"{LONG}yes", ""), (f"{LONG}yes\nno", "\nno"), (f"{LONG}yes{LONG}", LONG)):
        got = await router.retrieve(text)
        before, after = len(router.ids(LONG)), len(router.ids(rest)) if rest else 0
        assert got["tokens"] == [*router.ids(LONG), *ids, *(router.ids(rest) if rest else [])]
        assert got["loss_mask"] == [0] * before + [1] * len(ids) + [0] * after
        assert got["rollout_logp"] == [0.0] * before + [-0.5 - place for place in range(len(ids))] + [0.0] * after
        assert (got["response"], got["token_length"], got["loss_mask_length"]) == (text, *[len(got["tokens"])] * 2)
    stats = router.plugin.stats()
    assert (stats["lookups"], stats["hits"], stats["entries"]) == (4, 3, 1)


@pytest.mark.parametrize("body", [b'{"text": "%s' % LONG.encode(), b'{"text": "\\ud800%s"}' % LONG.encode()])
async def test_a_long_body_that_is_wrong_is_answered_as_a_short_one(router: Router, body: bytes) -> None:
    assert (await router.send("/retrieve_from_text", body))[0] == 400
    router.worker.answers.append((400, b"{}"))
    assert (await router.send("/generate", body))[0] == 400
    assert router.worker.seen == [body], "the worker says what is wrong with it"


@pytest.mark.parametrize("field", ["text", "rid"])
async def test_a_field_that_is_not_valid_unicode_reaches_the_worker_as_it_is(router: Router, field: str) -> None:
    body = json.dumps({"text": "q", "rid": "r"} | {field: "\ud800"}).encode()
    router.worker.answers.append((400, b"{}"))
    assert (await router.send("/generate", body))[0] == 400
    assert router.worker.seen == [body]
    assert router.plugin.stats()["lookups"] == 0


async def test_what_a_long_text_continues_may_be_evicted_while_it_is_tokenised(router: Router) -> None:
    await router.generate("a", answer("b", router.ids("b")))
    encode = router.plugin.cache._encode

    def evict_and_encode(text: str) -> list[int]:
        asyncio.run_coroutine_threadsafe(evict(), loop).result(60)
        return encode(text)

    async def evict() -> None:
        cache._drop(next(iter(cache._order)))

    cache, loop = router.plugin.cache, asyncio.get_running_loop()
    cache._encode = evict_and_encode
    await router.generate("ab" + LONG, answer("yes", router.ids("yes")))
    cache._encode = encode
    got = await router.retrieve(f"ab{LONG}yes")
    assert got["tokens"] == [*router.ids("a"), *router.ids("b"), *router.ids(LONG), *router.ids("yes")]
    assert router.plugin.stats()["entries"] == 1
