"""The counters of a forwarded sample: what is read from the kernel and from callgrind's files, and their table."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import counters
from benchmarks.process_counts import of_kernel


def test_the_sums_of_a_file_of_callgrind_are_read_once_it_is_complete(tmp_path: Path) -> None:
    dump = tmp_path / "of.7.1"
    dump.write_text("version: 1\ndesc: Trigger: dump\nevents: Ir Dr D1mr\nfn=(1) x\n5 10 4 2\n")
    assert counters._events(dump) == {}, "still being written"
    with dump.open("a") as file:
        file.write("totals: 10 4 2\n")
    assert counters._events(dump) == {"Ir": 10, "Dr": 4, "D1mr": 2}


def test_the_kernel_counts_page_faults_and_waits_of_a_process() -> None:
    before = of_kernel(os.getpid())
    memory = bytearray(64 * 2**20)
    after = of_kernel(os.getpid())
    assert after["page faults"] - before["page faults"] > len(memory) / 2**21, "at least one for each large page"
    assert after["user ms"] + after["kernel ms"] >= before["user ms"] + before["kernel ms"]


def test_the_table_has_the_ratio_to_the_fewest_in_flight() -> None:
    found = {
        "native": {64: {"system calls": 20.0, "collections": 0.0}, 512: {"system calls": 25.0, "collections": 0.0}}
    }
    header, calls, collections = counters.text(found).splitlines()
    assert header.split() == ["of", "a", "sample,", "native", "64", "512", "512", "/", "first"]
    assert calls.split()[-3:] == ["20", "25", "1.25"]
    assert collections.split() == ["collections", "0", "0"], "no ratio to nothing"
