"""Watches one policy: how many of its last answers were bad or slow, and whether that was too much."""

from __future__ import annotations

from collections import deque

WINDOW = 100
"""Calls that are looked back on."""
BAD_ALLOWED = 3
"""With so many bad answers among them a policy is tripped."""
SLOW_ALLOWED = 50
"""The same for slow ones. A slow answer is used, since it is there; and now and then the machine is to blame."""


class Guard:
    """`tripped` says why the policy is not asked any more, or "" while it is."""

    def __init__(self) -> None:
        self.tripped = ""
        self.calls = 0
        self.bad_calls = 0
        self.slow_calls = 0
        self.spent_ns = 0
        """Of all its calls."""
        self._bad: deque[int] = deque(maxlen=BAD_ALLOWED)
        self._slow: deque[int] = deque(maxlen=SLOW_ALLOWED)

    def bad(self, why: str) -> None:
        self.bad_calls += 1
        if self._full(self._bad):
            self.tripped = f"{BAD_ALLOWED} bad answers within {WINDOW} calls, the last one: {why}"

    def slow(self, spent_ns: int, budget_ns: int) -> None:
        self.slow_calls += 1
        if self._full(self._slow):
            self.tripped = (
                f"{SLOW_ALLOWED} of {WINDOW} calls took longer than {budget_ns / 1000:.0f} µs, the last one "
                f"{spent_ns / 1000:.0f} µs; raise policies.call_budget_us if that is worth it"
            )

    def _full(self, when: deque[int]) -> bool:
        when.append(self.calls)
        return len(when) == when.maxlen and self.calls - when[0] < WINDOW
