"""Runs a module of vLLM as `python -m MODULE` does, but without garbage collection while it is imported.

`python -m skyrl.inference.vllm_plugin.start MODULE ARGUMENT...`. vLLM imports 5,000 modules, which make two million
objects and hardly any garbage: looking for garbage among them takes a fifth of the time. Afterwards the collector
leaves these objects alone, so that the forked engine core shares their memory with the API server.

Knows nothing of the module.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys


def main() -> None:
    gc.disable()
    module = sys.argv[1]
    importlib.import_module(module)
    del sys.modules[module]  # the next line runs it again, as the main module; what it has imported stays
    gc.freeze()
    gc.enable()
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
