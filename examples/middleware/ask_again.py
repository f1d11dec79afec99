"""A middleware that asks more than once: an empty answer is sampled again.

skyrl router --worker http://127.0.0.1:30001 --middleware examples/middleware/ask_again.py:AskAgain
"""

from __future__ import annotations

from collections.abc import Mapping

from skyrl.router.messages import Request, Response
from skyrl.router.middleware import CallNext, RouterMiddleware

MOST_TRIES = 3


class AskAgain(RouterMiddleware):
    """Sends a /generate whose answer has no text again, up to MOST_TRIES times in all. Each try samples anew: do not
    use it where the distribution of samples matters, as in training."""

    asked_again = 0

    async def handle(self, request: Request, call_next: CallNext) -> Response:
        if request.path != "/generate":
            return await call_next(request)
        await request.body()  # keeps the body for the next try
        for _ in range(MOST_TRIES - 1):
            response = await call_next(request)
            try:
                answer = await response.json()
            except ValueError:
                return response  # a stream
            if response.status != 200 or not isinstance(answer, dict) or answer.get("text") != "":
                return response
            self.asked_again += 1
        return await call_next(request)

    def stats(self) -> Mapping[str, int | float]:
        return {"asked_again": self.asked_again}
