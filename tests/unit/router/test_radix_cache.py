"""The radix cache against a plain, linear model of its rules, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.router.radix.cache import RadixCache
from skyrl.router.radix.trajectory import Sample, Tokens

PIECES = ["a", "b", "ab", "ba", "aa", "bb", "<", "e", ">"]


def encode(text: str) -> list[int]:
    """A greedy tokenizer of two characters, so that a cut changes the tokens after it."""
    ids = []
    while text:
        piece = text[:2] if text[:2] in PIECES else text[:1]
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return ids


def sample(pieces: list[str], logprob: float = -1.0, hidden: str = "") -> Sample:
    shown = "".join(pieces)
    ids = [100 + PIECES.index(piece) for piece in pieces]
    ends = [(len("".join(pieces[:count])), count) for count in range(1, len(pieces) + 1)]
    if hidden:
        ids.append(200)
        ends.append((len(shown) + len(hidden), len(ids)))
    return Sample(shown, ids, [logprob - place for place in range(len(ids))], ends, hidden)


def retrieved(cache: RadixCache, text: str) -> Tokens:
    final = cache.whole(text)
    return cache.prompt(text).tokens if final is None else final.tokens()


@dataclass
class Stored:
    text: str
    version: str
    tokens: Tokens
    cuts: list[tuple[int, int]]  # (characters of the text, tokens of the whole trajectory)
    alive: bool = True


class Model:
    """All samples in a list. No tree, no sharing."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.stored: list[Stored] = []
        self.versions: list[str] = []

    def prompt(self, text: str) -> Tokens:
        found = (0, Tokens())
        for one in self.stored:
            whole = one.text
            for characters, count in one.cuts:
                if one.alive and characters >= found[0] and text.startswith(whole[:characters]):
                    tokens = one.tokens
                    found = (characters, Tokens(tokens.ids[:count], tokens.logprobs[:count], tokens.mask[:count]))
        rest = text[found[0] :]
        found[1].add_tokenised(encode(rest))
        return found[1]

    def retrieve(self, text: str, finals: dict[int, str]) -> Tokens:
        for place in reversed(range(len(self.stored))):
            if self.stored[place].alive and finals[place] == text:
                return self.stored[place].tokens
        return self.prompt(text)

    def store(self, text: str, before: Tokens, span: Sample, version: str) -> bool:
        if version not in self.versions:
            self.versions.append(version)
        live = self.versions[-self.kept :]
        for one in self.stored:
            one.alive = one.version in live
        if version not in live:
            return False
        mask = [*before.mask, *[1] * len(span.ids)]
        tokens = Tokens([*before.ids, *span.ids], [*before.logprobs, *span.logprobs], mask)
        cuts = [(len(text) + characters, len(before.ids) + count) for characters, count in span.cuts]
        self.stored.append(Stored(text + span.text + span.tail, version, tokens, cuts))
        return True


TEXTS = st.text("ab", min_size=1, max_size=8)
PARTS = st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=5)
STEP = st.tuples(
    TEXTS, PARTS, st.sampled_from(["0", "1", "7", "x"]), st.sampled_from(["", "", "a", "<e>"]), st.integers(-1, 30)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=14), st.integers(1, 4))
def test_the_cache_answers_as_the_plain_model(steps: list[tuple[str, list[str], str, str, int]], kept: int) -> None:
    cache, model, finals = RadixCache(encode, kept_versions=kept), Model(kept), {}
    for number, (text, parts, version, hidden, continued) in enumerate(steps):
        if 0 <= continued < len(model.stored):
            text = model.stored[continued].text + text
        prompt, expected = cache.prompt(text), model.prompt(text)
        assert prompt.tokens == expected
        span = sample(parts, -float(number), hidden)
        stored = cache.store(prompt, span, version)
        place = len(model.stored)
        assert stored == model.store(text, expected, span, version)
        if stored:
            finals[place] = text + span.text
        for asked in [text, *finals.values(), *(one.text + "ab" for one in model.stored)]:
            assert retrieved(cache, asked) == model.retrieve(asked, finals)


@settings(max_examples=50, deadline=None)
@given(st.lists(STEP, max_size=14), st.integers(0, 20_000))
def test_eviction_keeps_the_bound_and_whole_answers(
    steps: list[tuple[str, list[str], str, str, int]], bound: int
) -> None:
    cache, texts = RadixCache(encode, bound, 2), ["a"]
    for text, parts, version, hidden, continued in steps:
        text = texts[continued % len(texts)] + text
        prompt, other = cache.prompt(text), cache.prompt(text + "b")
        before = list(prompt.tokens.ids)
        for asked, span in ((prompt, sample(parts, hidden=hidden)), (other, sample(parts[::-1]))):
            cache.store(asked, span, version)
            assert cache.bytes <= bound
            texts.append(asked.text + span.text)
        assert list(prompt.tokens.ids) == before
        tokens = retrieved(cache, texts[-1])
        assert len(tokens.ids) == len(tokens.logprobs) == len(tokens.mask)
    empty = RadixCache(encode, max_bytes=0)
    empty.store(empty.prompt(texts[-1]), sample(["ab", "a"], hidden="<e>"), "0")
    assert (empty.bytes, len(empty)) == (0, 0)


def test_everything_goes_when_its_versions_go() -> None:
    cache = RadixCache(encode, kept_versions=1)
    for text in ("ab", "aba", "b", "abab"):
        cache.store(cache.prompt(text), sample(["ab", "a"]), "old")
    cache.store(cache.prompt("ababaab"), sample(["b"]), "new")
    assert cache.collected == 4
    assert retrieved(cache, "ababaabb").mask[-1] == 1
    cache.store(cache.prompt("b"), sample(["a"]), "newest")
    assert len(cache) == 1
    assert not cache.store(cache.prompt("b"), sample(["a"]), "old")


def test_the_least_recently_used_goes_first() -> None:
    cache = RadixCache(encode)
    cache.store(cache.prompt("a"), sample(["bb"]), "0")
    one = cache.bytes
    cache = RadixCache(encode, max_bytes=int(one * 2.5))
    for text in ("aa", "bb"):
        cache.store(cache.prompt(text), sample(["bb"]), "0")
    retrieved(cache, "aabb")
    cache.store(cache.prompt("ab"), sample(["bb"]), "0")
    assert [sum(retrieved(cache, text + "bb").mask) for text in ("aa", "bb", "ab")] == [1, 0, 1]
    assert cache.evictions == 1


def test_a_trajectory_outlives_what_it_continues_in_an_evicted_cache() -> None:
    cache = RadixCache(encode, max_bytes=4000)
    cache.store(cache.prompt("a"), sample(["b", "b"], -3.0), "0")
    waiting = cache.prompt("abba")
    for text in ("b", "bb", "ba", "aa"):
        cache.store(cache.prompt(text), sample(["ab"]), "0")
    assert sum(retrieved(cache, "abb").mask) == 0
    cache.store(waiting, sample(["b"]), "0")
    assert list(retrieved(cache, "abbab").logprobs) == [0.0, -3.0, -4.0, 0.0, -1.0]


def test_prompts_do_not_change_each_other() -> None:
    cache = RadixCache(encode)
    cache.store(cache.prompt("ab"), sample(["a"]), "0")
    assert list(cache.prompt("aab").tokens.ids) == encode("aab")
    assert list(cache.prompt("abab").tokens.ids) == [*encode("ab"), 100, *encode("b")]


def test_cuts_ascend() -> None:
    assert all(one < two for one, two in pairwise(sample(["a", "ab"], hidden="<e>").cuts))
