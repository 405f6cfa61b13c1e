"""Token buckets: how much a key may still ask for in this minute. Pure: the time comes from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.plugins.openai.tenants.keys import Limits

MINUTE = 60.0
COUNTS = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "prompt_tokens_per_minute": "prompt-tokens",
    "output_tokens_per_minute": "output-tokens",
}
"""Limits by the minute, and how headers name what they count."""


@dataclass(slots=True)
class Bucket:
    """Fills at `limit` a minute, up to `limit`. What an answer costs is known only as it comes, so the level may fall
    below zero: then nothing more is given until it has filled again."""

    limit: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(self.limit, self.level + (now - self.at) * self.limit / MINUTE)
        self.at = now

    def wait(self, need: float) -> float:
        """Seconds until `need` is there, as of the last `fill`."""
        return max(0.0, (need - self.level) * MINUTE / self.limit)

    @property
    def full_in(self) -> float:
        return self.wait(self.limit)


class Allowance:
    """The buckets of one key."""

    def __init__(self, limits: Limits, now: float) -> None:
        given = limits.given()
        self._buckets = {name: Bucket(given[name], given[name], now) for name in COUNTS if name in given}

    def take_request(self, now: float) -> tuple[str, float] | None:
        """Take one request; or which limit forbids it, and for how many seconds yet."""
        for name, bucket in self._buckets.items():
            bucket.fill(now)
            if wait := bucket.wait(1.0):
                return name, wait
        if (requests := self._buckets.get("requests_per_minute")) is not None:
            requests.level -= 1
        return None

    def spend(self, prompt: int, output: int, now: float) -> None:
        """Tokens; below zero, what was not needed after all."""
        spent = {
            "tokens_per_minute": prompt + output,
            "prompt_tokens_per_minute": prompt,
            "output_tokens_per_minute": output,
        }
        for name, n in spent.items():
            if n and (bucket := self._buckets.get(name)) is not None:
                bucket.fill(now)
                bucket.level -= n

    def headers(self) -> dict[str, str]:
        """As OpenAI's API has them."""
        found: dict[str, str] = {}
        for name, bucket in self._buckets.items():
            what = COUNTS[name]
            found[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{what}"] = f"{bucket.full_in:.3f}s"
        return found
