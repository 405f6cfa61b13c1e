"""What the kit says when a policy does not keep the contract."""

from __future__ import annotations


class PolicyFault(AssertionError):
    """`what` was wrong, `where` it was seen, and `advice` on what to do."""

    def __init__(self, what: str, where: str, advice: str) -> None:
        super().__init__(f"{what}\n  seen: {where}\n  to do: {advice}")
        self.what = what
        self.where = where
        self.advice = advice
