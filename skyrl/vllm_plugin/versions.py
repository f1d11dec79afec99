"""The versions of vLLM whose insides the plugin knows. Imports nothing, for those who only ask."""

from __future__ import annotations

TESTED_VERSIONS = ("0.32.",)
