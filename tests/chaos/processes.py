"""A running server's processes, found from its launcher down, never by name over the whole machine."""

from __future__ import annotations

import psutil

from tests.chaos.plan import API, ENGINE, LAUNCHER, VLLM_CORE, VLLM_SERVER

WORDS = {
    API: "skyrl.api.server",
    ENGINE: "skyrl.engine.main",
    VLLM_SERVER: "vllm.entrypoints.openai.api_server",
    VLLM_CORE: "EngineCore",
}


def find(launcher: psutil.Process, victim: str) -> psutil.Process | None:
    """None while there is none."""
    if victim == LAUNCHER:
        return launcher
    for process in tree(launcher)[1:]:
        try:
            if any(WORDS[victim] in word for word in process.cmdline()):
                return process
        except psutil.Error:  # it has ended meanwhile
            continue
    return None


def tree(launcher: psutil.Process) -> list[psutil.Process]:
    """The launcher and all below it, parents first."""
    try:
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [launcher]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
