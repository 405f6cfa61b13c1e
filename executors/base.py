"""What an executor is to the rest: something that runs bound steps in order.

It never chooses work, never sees a socket or a clock, and knows its model; its process shell is `actor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self, runtime_checkable

from octavo.core.config.schema import Config
from octavo.core.messages import Facts, StepBind, StepPlan, StepResult
from octavo.executors.adapters import Holds


class Executor(Protocol):
    """Entry-point group `octavo.executor`."""

    @classmethod
    def load(cls, config: Config) -> Self:
        """Load weights and make the KV pool; raises with the reason if that cannot be."""
        ...

    @property
    def facts(self) -> Facts: ...

    @property
    def adapters(self) -> Holds | None:
        """LoRA adapters that it computes with; None if it has no such arithmetic."""
        ...

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        """Run one step. Steps come in the order they were bound; what an earlier one wrote is there."""
        ...

    @property
    def stats(self) -> dict[str, int]:
        """Numbers of its own that grow, for heartbeats."""
        ...

    def forget(self) -> None:
        """The KV-manager's state was lost: nothing is resident any more."""
        ...


@runtime_checkable
class InRounds(Protocol):
    """Of an executor that serves `rounds`."""

    go_on: Callable[[], bool]
    """Asked between two rounds of a plan, for whoever runs it to say whether another is to be begun."""


@runtime_checkable
class Ahead(Protocol):
    """Of an executor that begins a step before the one before it has ended."""

    def begin(self, plan: StepPlan, bind: StepBind) -> list[StepResult]:
        """Launch a step; it is under way afterwards. Gives the results of earlier ones that are there by then, in
        order."""
        ...

    @property
    def under_way(self) -> bool:
        """Whether a step has begun whose result was not given."""
        ...

    @property
    def there(self) -> bool:
        """Whether its result can be had without waiting."""
        ...

    def end(self) -> list[StepResult]:
        """Wait for the step that is under way, if one is, and give its result."""
        ...
