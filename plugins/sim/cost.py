"""How long a step takes: a linear model of its work, plus what its way through the processes costs.

The numbers come from a file that `octavo calibrate` writes, or are those below: SmolLM2-135M in fp32 on one thread of a
busy machine with two cores (345 steps; a step's prediction is off by 8 % on average). Knows nothing of schedulers;
`core.work` says what the work of a step is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from octavo.core.work import Work

NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All in seconds. A step's duration is `step` + the sum of each coefficient times the work it stands for."""

    step: NotNegative = 9.6e-2
    """For being a step at all."""
    prefill_token: NotNegative = 3.5e-3
    """For each prompt token computed."""
    decode: NotNegative = 3.4e-3
    """For each sequence that decodes."""
    guess: NotNegative | None = None
    """For each guessed token that is verified; None: as much as `decode`."""
    attention: NotNegative = 1.5e-6
    """For each pair of a computed token and a token that it attends to."""
    kv_token: NotNegative = 5.9e-5
    """For each cached token read (its bytes are the executor's `block_bytes` / block size)."""
    copied_block: NotNegative = 1.5e-4
    """For each block copied, for a fork or to or from host memory: its bytes over the bandwidth (737 kB at 5 GB/s)."""
    to_kv: NotNegative = 2.5e-4
    """From the result before (or an idle scheduler) to the bound plan: scheduler → KV-manager."""
    to_executor: NotNegative = 2.5e-4
    """From the bound plan to a free executor's start."""
    between: NotNegative = 0.0
    """From a step's end to the start of the next one, if that is bound already: results are sent, plans are read."""
    to_scheduler: NotNegative = 3.0e-4
    """From the executor's end to the scheduler's taking the result."""
    to_client: NotNegative = 4.0e-4
    """Each way between a client and the scheduler, through the tokenizer."""

    def duration_s(self, work: Work) -> float:
        """A step without an item (it only releases) takes no time, but for what it copies."""
        copying = self.copied_block * work.copied
        if not work.prefill_tokens and not work.decodes:
            return copying
        return (
            copying
            + self.step * work.rounds
            + self.prefill_token * work.prefill_tokens
            + self.decode * work.decodes * work.rounds
            + (self.decode if self.guess is None else self.guess) * work.guesses
            + self.attention * work.attention
            + self.kv_token * work.kv_tokens
        )

    def request_s(self, prompt: float, output: float, together: int) -> float:
        """Roughly what a request takes of the executor when `together` of them share its steps."""
        context = prompt + output / 2
        each = self.step / together + self.decode + (self.attention + self.kv_token) * context
        return self.prefill_token * prompt + self.attention * prompt * prompt / 2 + each * output


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `calibrate` writes: the model and how well it fits, see `fit`."""

    cost: CostModel
    steps: int = 0
    mean_error: float = 0.0
    """Mean of |predicted - measured| / measured over the steps."""
    p90_error: float = 0.0
    bias: float = 0.0
    """Predicted over measured time of all steps together, less 1."""
    source: str = ""


def load_cost(path: Path | None) -> CostModel:
    """The defaults, or a file's model. Raises ValueError saying what is wrong with the file."""
    if path is None:
        return CostModel()
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostFile).cost
    except OSError as error:
        raise ValueError(f"--cost {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"--cost {path} is not what `octavo calibrate` writes: {error}") from None
