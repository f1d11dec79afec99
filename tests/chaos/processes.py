"""The processes of a running server, found among the descendants of its launcher. Other processes of the machine are
not searched.
"""

from __future__ import annotations

import psutil

from tests.chaos.plan import API, ENGINE, LAUNCHER, VLLM_CORE, VLLM_SERVER

COMMAND_WORDS = {
    API: "skyrl.api.server",
    ENGINE: "skyrl.engine.main",
    VLLM_SERVER: "vllm.entrypoints.openai.api_server",
    VLLM_CORE: "EngineCore",
}


def find(launcher: psutil.Process, victim: str) -> psutil.Process | None:
    """The process of that role, or None while none runs."""
    if victim == LAUNCHER:
        return launcher
    for process in tree(launcher)[1:]:
        try:
            if any(COMMAND_WORDS[victim] in word for word in process.cmdline()):
                return process
        except psutil.Error:  # the process has ended meanwhile
            continue
    return None


def tree(launcher: psutil.Process) -> list[psutil.Process]:
    """The launcher and its descendants, parents first."""
    try:
        return [launcher, *launcher.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [launcher]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
