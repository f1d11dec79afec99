"""The versions of vLLM that the plugin was tested with. Imports nothing, so that reading them is cheap."""

from __future__ import annotations

TESTED_VERSIONS = ("0.32.",)
