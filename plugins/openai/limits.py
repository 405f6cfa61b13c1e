"""Token buckets: how much a key may still ask for in this minute. Pure: the time comes from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE = 60.0


@dataclass(slots=True)
class Bucket:
    """Fills at `limit` a minute, up to `limit`. What an answer costs is known at its end, so the level may fall below
    zero: then nothing more is given until it has filled again."""

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

    def __init__(self, requests: int | None, tokens: int | None, now: float) -> None:
        made = {"requests": requests, "tokens": tokens}
        self._buckets = {what: Bucket(n, n, now) for what, n in made.items() if n is not None}

    def take_request(self, now: float) -> tuple[str, float] | None:
        """Take one request; or which limit forbids it, and for how many seconds yet."""
        for what, bucket in self._buckets.items():
            bucket.fill(now)
            if wait := bucket.wait(1.0):
                return what, wait
        if (requests := self._buckets.get("requests")) is not None:
            requests.level -= 1
        return None

    def spend_tokens(self, n: int, now: float) -> None:
        if (tokens := self._buckets.get("tokens")) is not None:
            tokens.fill(now)
            tokens.level -= n

    def headers(self) -> dict[str, str]:
        """As OpenAI's API has them."""
        found: dict[str, str] = {}
        for what, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{what}"] = str(bucket.limit)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{what}"] = f"{bucket.full_in:.3f}s"
        return found
