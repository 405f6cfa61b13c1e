"""What a run was worth, as numbers: spreads, service objectives, and fairness between tenants.

Pure arithmetic: knows nothing of how the times were measured, in a simulation or on a machine. Times are seconds.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers; percentiles are interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


def spread(values: Floats) -> Spread | None:
    """None where there is nothing to speak of. NaN stands for a request without the number (TPOT of one token)."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(count=len(values), mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as good, in seconds; None asks nothing."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From `ttft=0.5,tpot=0.05`. Raises ValueError with what is wrong."""
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name.strip() not in cls.__struct_fields__:
                raise ValueError(f"--slo {part!r}: not one of {', '.join(cls.__struct_fields__)} with =SECONDS")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                raise ValueError(f"--slo {part!r}: {value!r} is not a number of seconds") from None
            if not values[name.strip()] > 0:
                raise ValueError(f"--slo {part!r}: must be above 0 seconds")
        return cls(**values)

    def kept(self, ttft: Floats, tpot: Floats, e2e: Floats) -> npt.NDArray[np.bool_]:
        """Per request. A request that never got a token has NaN and keeps nothing; one without TPOT keeps that."""
        good = ~np.isnan(e2e)
        for limit, values in ((self.ttft, ttft), (self.e2e, e2e)):
            if limit is not None:
                good &= values <= limit
        if self.tpot is not None:
            good &= np.isnan(tpot) | (tpot <= self.tpot)
        return good


def tpot(first: Floats, last: Floats, tokens: Counts) -> Floats:
    """Time per output token after the first; NaN for requests with one token, which have none."""
    later = np.where(tokens > 1, tokens - 1, 1)
    return np.where(tokens > 1, (last - first) / later, np.nan)


def jain(shares: Floats) -> float:
    """Jain's fairness index of what each got: 1 if all are equal, 1/n if one has everything."""
    total = float(shares.sum())
    if not len(shares) or total == 0:
        return 1.0
    shares = shares / total  # or squares of tiny shares vanish
    return float(1.0 / (len(shares) * (shares * shares).sum()))


def speeds(tenant: Counts, tokens: Counts, e2e: Floats) -> Floats:
    """Output tokens a second of each tenant's requests, from asked to answered: what `jain` compares.

    Unlike its throughput, that does not depend on how much a tenant asks. Unserved requests (NaN) are left out."""
    served = ~np.isnan(e2e) & (e2e > 0)
    size = int(tenant.max(initial=-1)) + 1
    given = np.bincount(tenant[served], tokens[served], size)
    waited = np.bincount(tenant[served], e2e[served], size)
    return given[waited > 0] / waited[waited > 0]


class Service:
    """What tenants got while they wanted more, after Sheng et al., Fairness in Serving LLMs (VTC).

    A tenant is backlogged while something of it waits. Tokens are weighted: a prompt token computed is 1, an output
    token 2. `gap` is the largest difference between the counters of two backlogged tenants. Idling earns nothing: a
    tenant that comes back starts from the lowest counter of those who wait, or of the last one who did."""

    PROMPT, OUTPUT = 1, 2

    def __init__(self) -> None:
        self.gap = 0
        self._tenants = 0
        self._waiting: Counts = np.zeros(8, dtype=np.int64)
        self._counter: Counts = np.zeros(8, dtype=np.int64)
        self._last = 0
        """Who was the last to wait."""

    def tenant(self) -> int:
        """One more tenant; its number."""
        if self._tenants == len(self._waiting):
            self._waiting = np.pad(self._waiting, (0, self._tenants))
            self._counter = np.pad(self._counter, (0, self._tenants))
        self._tenants += 1
        return self._tenants - 1

    def waits(self, tenant: int) -> None:
        """One more of this tenant's sequences waits."""
        if self._waiting[tenant] == 0:
            others = self._counter[self._waiting > 0]
            least = int(others.min()) if len(others) else int(self._counter[self._last])
            self._counter[tenant] = max(int(self._counter[tenant]), least)
        self._waiting[tenant] += 1

    def leaves(self, tenant: int) -> None:
        """One of them waits no longer."""
        self._waiting[tenant] -= 1
        self._last = tenant

    def serve(self, tenants: Counts, weights: Counts) -> None:
        """Weighted tokens for each of these (tenants may repeat)."""
        self._counter += np.bincount(tenants, weights, len(self._counter)).astype(np.int64)
        counters = self._counter[self._waiting > 0]
        if len(counters) > 1:
            self.gap = max(self.gap, int(counters.max() - counters.min()))
