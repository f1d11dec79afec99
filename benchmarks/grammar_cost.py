"""What the shape of an answer costs vLLM: the time in which xgrammar, which vLLM uses, compiles it and makes the first
mask of allowed tokens. vLLM makes a mask at every step, for which all its requests wait.

Usage: python -m benchmarks.grammar_cost (a part of docs/decisions/openai-requests.md; takes some minutes)
"""

from __future__ import annotations

import json
import multiprocessing
import random
import string
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

LIMIT_S = 90.0
"""A case that takes longer is ended."""
VOCABULARIES = (512, 50_000)
STRING = {"type": "string"}
CASES: dict[str, tuple[str, str]] = {
    "regex, 16 times `.?`": ("regex", ".?" * 16),
    "regex, 24 times `.?`": ("regex", ".?" * 24),
    "regex, 8 times `(.?){0,9}`": ("regex", "(.?){0,9}" * 8),
    'grammar, 2,000 times `"a"?`': ("grammar", "root ::= " + ' "a"?' * 2000),
    "schema, 300 optional properties": (
        "schema",
        json.dumps({"type": "object", "properties": {f"p{n}": STRING for n in range(300)}}),
    ),
    "schema, `enum` of 1,000 texts": ("schema", json.dumps({"enum": [f"text {n}" for n in range(1000)]})),
    "schema, 100 objects in an `anyOf`": (
        "schema",
        json.dumps({"anyOf": [{"type": "object", "properties": {f"p{n}": STRING}} for n in range(100)]}),
    ),
    "schema, 20 strings of different `maxLength` in an `anyOf`": (
        "schema",
        json.dumps({"anyOf": [STRING | {"maxLength": 20 + n} for n in range(20)]}),
    ),
    "schema, 100 strings of different `maxLength`": (
        "schema",
        json.dumps({"type": "object", "properties": {f"p{n}": STRING | {"maxLength": 20 + n} for n in range(100)}}),
    ),
}


def vocabulary(size: int) -> list[str]:
    """All characters of ASCII, and made-up words; the last token ends an answer."""
    draw = random.Random(0)
    tokens = dict.fromkeys(chr(n) for n in range(128))
    while len(tokens) < size - 1:
        word = "".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(2, 8)))
        tokens[draw.choice(("", " ")) + word] = None
    return [*tokens, "</s>"]


def measure(kind: str, text: str, size: int, out: Connection) -> None:
    """Send the seconds to compile, and then those of the first mask."""
    import xgrammar

    tokens = xgrammar.TokenizerInfo(vocabulary(size), stop_token_ids=[size - 1])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1)
    compile_kinds: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
        "regex": compiler.compile_regex,
        "grammar": compiler.compile_grammar,
        "schema": compiler.compile_json_schema,
    }
    began = time.perf_counter()
    compiled = compile_kinds[kind](text)
    out.send(time.perf_counter() - began)
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, size)
    began = time.perf_counter()
    matcher.fill_next_token_bitmask(mask)
    out.send(time.perf_counter() - began)


def seconds(kind: str, text: str, size: int) -> list[float]:
    """The seconds to compile and of the first mask; those that took longer than LIMIT_S are not there."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(kind, text, size, there))
    process.start()
    there.close()
    found: list[float] = []
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(found) < 2 and here.poll(max(0.0, deadline - time.monotonic())):
            found.append(here.recv())
    except EOFError:
        raise SystemExit(f"xgrammar refuses this {kind}: {text[:60]}") from None
    finally:
        process.kill()
        process.join()
    return found


def main() -> None:
    print("| |", " | ".join(f"{size:,}: compile, mask" for size in VOCABULARIES), "|")
    print("|---" * (1 + len(VOCABULARIES)) + "|")
    for name, (kind, text) in CASES.items():
        cells = [", ".join(f"{took:.3g} s" for took in seconds(kind, text, size)) for size in VOCABULARIES]
        print(f"| {name} |", " | ".join(cell or f"over {LIMIT_S:g} s" for cell in cells), "|", flush=True)


if __name__ == "__main__":
    main()
