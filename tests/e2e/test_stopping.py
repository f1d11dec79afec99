"""SIGTERM with a sample in flight: its client gets the result, new samples are told to wait, nothing is left behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import tinker
from transformers import PreTrainedTokenizerBase

from skyrl.demo.server import DemoServer

from .conftest import SLOW_START_S, database, greedy

pytestmark = pytest.mark.vllm


def test_drain(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> None:
    server = DemoServer(tmp_path_factory.mktemp("stopping"))
    server.start()
    try:
        server.wait_ready(SLOW_START_S)
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        sampler = client.create_sampling_client(base_model="tiny").result()
        prompt = tokenizer.encode("The old")
        with ThreadPoolExecutor(1) as pool:
            sample = pool.submit(greedy, sampler, prompt, 500)
            while not server.status()["samples"]["in_flight"]:
                if sample.done():  # before anybody saw it
                    sample = pool.submit(greedy, sampler, prompt, 500)
                time.sleep(0.01)
            os.kill(server.pid, signal.SIGTERM)
            assert len(sample.result()) == 500
        assert _ended(family)
        with pytest.raises(httpx.TransportError):
            server.status()
        with sqlite3.connect(database(server)) as connection:
            pending = list(connection.execute("select count(*) from futures where status = 'pending'"))
        assert pending == [(0,)]
    finally:
        server.stop()


def _ended(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=300)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
