"""The credit ledger: how many blocks the next plan may take, without asking.

    credit = available at the last ack - debits of plans not yet acked

Plans that take and give nothing are acked only if there is something else to say.
A debit is an upper bound of what its plan takes; a release counts only when it is acked. So a plan within its
credit always binds. `coming` is what releases under way will probably free: a hint for preemption, never spent.
"""

from __future__ import annotations


class Ledger:
    def __init__(self) -> None:
        self.total = 0
        self._available = 0
        self._plans: dict[int, tuple[int, int]] = {}
        """By step not yet acked that takes or gives something: its debit, and the blocks it probably frees."""
        self._debits = 0
        self._coming = 0

    def reset(self, total: int, available: int) -> None:
        """The KV-manager's state is new: nothing is under way."""
        self.total = total
        self._available = available
        self._plans.clear()
        self._debits = self._coming = 0

    @property
    def credit(self) -> int:
        return self._available - self._debits

    @property
    def available(self) -> int:
        """Free and evictable blocks at the last ack."""
        return self._available

    @property
    def coming(self) -> int:
        return self._coming

    def debit(self, step: int, blocks: int, freed: int) -> None:
        """A plan goes out that takes up to `blocks` and releases about `freed`."""
        if blocks or freed:
            self._plans[step] = (blocks, freed)
            self._debits += blocks
            self._coming += freed

    def ack(self, step: int, available: int) -> None:
        """The step is bound. Acks come in order; the step's debit is inside `available` from now on."""
        blocks, freed = self._plans.pop(step, (0, 0))
        self._debits -= blocks
        self._coming -= freed
        self._available = available
