"""Why agent sessions end, and why their turns fork. Imports nothing: the launcher names them in its metrics."""

from __future__ import annotations

from typing import Literal

EndReason = Literal["called", "turns", "tokens", "bytes", "time", "idle"]
"""Why a session has ended: by a call, at one of its limits, or because nothing was asked for a time."""

ForkReason = Literal[
    "system_changed",
    "user_changed",
    "tool_result_changed",
    "tool_call_changed",
    "thinking_changed",
    "answer_changed",
    "messages_dropped",
    "messages_inserted",
    "tools_changed",
    "branch",
    "asked_again",
    "template_rewrites",
    "not_extendable",
]
"""Why a turn does not continue the newest turn before it. All but the last four name the first message that differs.
`branch`: an earlier turn was continued a second time. `asked_again`: the same request, after its answer had been
delivered. `template_rewrites`: the model's template writes an earlier part of the conversation otherwise now, as when
it drops thoughts. `not_extendable`: it gives no tokens that can follow the earlier turn's."""
