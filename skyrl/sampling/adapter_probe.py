"""Whether an inference server that skyrl does not run uses adapters, or ignores them without a word.

vLLM without skyrl's plugin takes an adapter whose layers have other names than its own, says that it is loaded, and
samples the base model under the adapter's name. So before the first adapter with these layers is loaded on a server,
the server loads the same adapter once with a large alpha, under another name, and scores a few tokens with and without
it. A change of logprobs by an adapter of that size cannot be hidden by rounding, however small the adapter itself is.
Where the server changes nothing, samples from such adapters fail.

One adapter is compared as a whole: a server that ignores a part of its layers passes. skyrl's plugin refuses these, and
the comparison at the start (`compare_with_trainer`) finds them. Nothing is compared, and the adapter is used, where all
lora_B are zero, where this process does not see the files that the server reads, and where the server does not answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from skyrl.base.adapter_files import PEFT_JSON, PEFT_TENSORS, DoesNotFit, largest_b, layers_key
from skyrl.http.client import HttpClient
from skyrl.http.connection import Interrupted, NotAccepted
from skyrl.inference import vllm_client

logger = logging.getLogger(__name__)

TOKENS = list(range(5, 21))
SCALED_B = 0.5
"""The root mean square of the largest lora_B, times alpha divided by the highest rank: an update of about the size of a
layer's output."""
LEAST_CHANGE = 0.05
"""In nats, a median over the tokens. A tiny random model changes by 0.3 and more, a trained one by several nats; an
ignored adapter by what two runs differ."""
TIMEOUT_S = 60.0
MAX_KNOWN = 1_000
FORGET_S = 60.0
"""How long a server that has ignored an adapter, or has not answered, is not asked again."""
TRUSTED_S = 3600.0
"""How long one that uses adapters is not asked again: another server may have taken its address."""


class _Outcome(NamedTuple):
    ignored: bool
    until: float


class AdapterProbe:
    """`scratch`: a directory that the server reads under the same path, as it reads adapters. `base_model`: its name
    on the server."""

    def __init__(self, transport: HttpClient, api_key: str | None, base_model: str, scratch: Path) -> None:
        self._transport = transport
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._headers = {"Content-Type": "application/json"} | key
        self._base_model = base_model
        self._scratch = scratch
        self._known: dict[tuple[str, str], _Outcome] = {}
        """By server and layers."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By server."""

    async def ignored(self, url: str, directory: str) -> bool:
        """Whether the server at `url` is known to ignore adapters with the layers of the one in `directory`."""
        try:
            layers = await asyncio.to_thread(layers_key, Path(directory))
        except (OSError, DoesNotFit) as error:
            logger.debug("the adapter in %s is not compared: %s", directory, error)
            return False
        turn = self._turns.setdefault(url, asyncio.Lock())
        async with turn:  # adapters that come together have the same layers more often than not
            known = self._known.get((url, layers))
            if known is None or known.until < time.monotonic():
                known = await self._compare(url, Path(directory))
                if known is None:
                    return False
                if len(self._known) >= MAX_KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[url, layers] = known
        return known.ignored

    async def _compare(self, url: str, directory: Path) -> _Outcome | None:
        """None for an adapter that changes nothing: the next one with these layers may."""
        probe = self._scratch / f".tmp-{secrets.token_hex(8)}"
        name = f"skyrl-probe-{secrets.token_hex(8)}"
        try:
            if not await asyncio.to_thread(_enlarge, directory, probe):
                return None
            change = await self._change(url, name, probe)
        except (OSError, ValueError, NotAccepted, Interrupted, LookupError, TypeError, AttributeError) as error:
            logger.warning("whether %s uses adapters could not be found out: %s: %s", url, type(error).__name__, error)
            change = None
        finally:
            await asyncio.to_thread(shutil.rmtree, probe, ignore_errors=True)
        asked_again = time.monotonic() + FORGET_S
        if change is None:
            return _Outcome(ignored=False, until=asked_again)
        if change >= LEAST_CHANGE:
            logger.info("%s uses adapters with these layers: logprobs change by %.2g nats", url, change)
            return _Outcome(ignored=False, until=time.monotonic() + TRUSTED_S)
        return _Outcome(ignored=True, until=asked_again)

    async def _change(self, url: str, name: str, probe: Path) -> float | None:
        """How far the probe moves the server's logprobs, in nats; None if the server does not say."""
        loaded = await self._post(f"{url}{vllm_client.PATH}", vllm_client.load_request(name, str(probe)))
        if loaded is None:
            return None
        try:
            base, changed = await self._logprobs(url, self._base_model), await self._logprobs(url, name)
        finally:
            await self._post(f"{url}/v1/unload_lora_adapter", {"lora_name": name})
        if base is None or changed is None:
            return None
        # A server that gives no number for a logprob is no server that ignores the adapter.
        apart = (abs(one - other) for one, other in zip(base, changed, strict=True))
        return median(each if math.isfinite(each) else math.inf for each in apart)

    async def _logprobs(self, url: str, model: str) -> list[float] | None:
        body = {"model": model, "prompt": TOKENS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._post(f"{url}/v1/completions", body)
        if answer is None:
            return None
        rows = msgspec.json.decode(answer)["choices"][0]["prompt_logprobs"]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], TOKENS[1:], strict=True)]

    async def _post(self, url: str, body: Mapping[str, Any]) -> bytes | None:
        """The answer's body; None for an answer that is no success."""
        answer = await self._transport.post(url, msgspec.json.encode(body), self._headers, TIMEOUT_S)
        try:
            return bytes(answer.body) if 200 <= answer.status < 300 else None
        finally:
            answer.release()


def _enlarge(directory: Path, probe: Path) -> bool:
    """Write the adapter with a larger alpha. False for an adapter that changes nothing."""
    largest = largest_b(directory)
    if largest == 0 or not math.isfinite(largest):
        return False
    probe.mkdir(parents=True)
    source = directory / PEFT_TENSORS
    try:
        os.link(source.resolve(), probe / PEFT_TENSORS)
    except OSError:
        shutil.copyfile(source, probe / PEFT_TENSORS)
    config = json.loads((directory / PEFT_JSON).read_bytes())
    highest = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    config["lora_alpha"] = max(config["lora_alpha"], SCALED_B / largest * highest)
    (probe / PEFT_JSON).write_text(json.dumps(config))
    return True
