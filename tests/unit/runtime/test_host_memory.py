"""The host's free memory, within the limits of cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.runtime.processes.host_resources import free_host_bytes, host_bytes, limit_bytes, trim


def _host(root: Path, cgroup: str) -> Path:
    """A root directory with 5,000 KiB of free memory and a process in `cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def _limit(group: Path, limit: str, used: int = 900_000) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 70000\nactive_file 3\n")


def test_free_memory_is_what_the_kernel_and_the_cgroup_leave(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/\n")
    assert free_host_bytes(root) == 5000 * 1024, "no cgroup has limits"
    group = root / "sys/fs/cgroup"
    _limit(group, "max")
    assert free_host_bytes(root) == 5000 * 1024, "a cgroup without a limit"
    _limit(group, "1000000")
    assert free_host_bytes(root) == 1_000_000 - 900_000 + 70_000, "pages of files can be given back"
    _limit(group, "100000")
    assert free_host_bytes(root) == 0
    assert free_host_bytes() > 0


def test_all_memory_is_that_of_the_host_and_its_swap_space(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/\n")
    assert host_bytes(root) == 9000 * 1024, "a host without swap space"
    with (root / "proc/meminfo").open("a") as meminfo:
        meminfo.write("SwapTotal:       1000 kB\n")
    assert host_bytes(root) == 10_000 * 1024
    assert host_bytes() > free_host_bytes()


def test_the_limit_is_what_there_is_whatever_is_used_of_it(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/skyrl.service/trainer\n")
    group = root / "sys/fs/cgroup"
    assert limit_bytes(root) == 9000 * 1024, "no cgroup has limits"
    _limit(group / "skyrl.service", "1000000", used=999_999)
    _limit(group / "skyrl.service/trainer", "max")
    assert limit_bytes(root) == 1_000_000
    _limit(group / "skyrl.service/trainer", "900000", used=5)
    assert limit_bytes(root) == 900_000


def test_the_least_of_all_limits_from_the_own_cgroup_to_the_highest_one_counts(tmp_path: Path) -> None:
    root = _host(tmp_path, "1:name=systemd:/elsewhere\n0::/system.slice/skyrl.service/trainer\n")
    group = root / "sys/fs/cgroup"
    _limit(group / "elsewhere", "900000")
    _limit(group / "system.slice", "max")
    _limit(group / "system.slice/skyrl.service", "1000000")
    assert free_host_bytes(root) == 170_000, "the service's limit; its child has none"
    _limit(group / "system.slice/skyrl.service/trainer", "500000", used=440_000)
    assert free_host_bytes(root) == 130_000
    _limit(group / "system.slice", "950000")
    assert free_host_bytes(root) == 120_000


@pytest.mark.parametrize("path", ["/docker/ab12", "/../../host"])
def test_where_the_own_cgroup_is_not_visible_those_above_it_count(path: str, tmp_path: Path) -> None:
    root = _host(tmp_path / "root", f"0::{path}\n")
    _limit(root / "sys/fs/cgroup", "1000000")
    _limit(tmp_path / "root/sys/host", "900000")
    assert free_host_bytes(root) == 170_000


def test_limits_of_cgroups_of_version_1_count(tmp_path: Path) -> None:
    root = _host(tmp_path, "9:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    group = root / "sys/fs/cgroup/memory/a"
    (group / "b").mkdir(parents=True)
    for directory, limit in ((group, 1_000_000), (group / "b", 2**63 - 4096)):
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text("900000\n")
        (directory / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 70000\n")
    assert free_host_bytes(root) == 170_000


def test_without_cgroups_the_kernels_figure_counts(tmp_path: Path) -> None:
    root = _host(tmp_path, "")
    (root / "proc/self/cgroup").unlink()
    assert free_host_bytes(root) == 5000 * 1024


def test_freed_memory_goes_back_to_the_kernel() -> None:
    """Blocks of 64 kB lie in glibc's heap. The last one stays, so the heap cannot shrink at its end."""

    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    trim()
    before = resident()
    blocks = [bytearray(b"x" * 2**16) for _ in range(1000)]
    last = blocks.pop()
    assert resident() - before > 60e6
    del blocks
    trim()
    assert resident() - before < 20e6
    assert last
