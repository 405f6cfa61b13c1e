"""First come, first served: admit in the order of arrival; whoever does not fit holds up those behind."""

from __future__ import annotations

import numpy as np

from octavo.policies.contract import Running, Selection, Step, Waiting


class Fcfs:
    """Continuous batching in arrival order (Orca, Yu et al., OSDI 2022)."""

    def select(self, step: Step, waiting: Waiting, running: Running) -> Selection:
        return Selection(admit=np.arange(len(waiting), dtype=np.int32), when_blocked="stop")
