"""A step's pass on a device and its draws: a `Passes` of the frame. Launches everything when the step begins, and reads
what came of it once, when it ends.

A step may begin while the one before it is under way: ids that the host does not know are taken from what that one drew
(`Decoder.said`). Only a draw that depends on which tokens were said needs the host to know them. Then the pass is
launched, and the step before it is ended before the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.messages import TokenLogprob
from octavo.executors.cuda.batch import of_runs
from octavo.executors.cuda.decoder import SAID
from octavo.executors.cuda.forward import Forward
from octavo.executors.cuda.graphs import Pass
from octavo.executors.cuda.mirror import Reading, mirrored
from octavo.executors.cuda.speaker import Saying, Speaker
from octavo.executors.drafting.contract import Draft
from octavo.executors.frame import Asked, Begun
from octavo.executors.outcome import Outcomes
from octavo.executors.residents import Run, Runs, slots_of
from octavo.executors.sampling import logprob

PROMPT_ROWS = 32
"""Rows of logits at a time, where every position of a prompt is asked for: a row is as long as the vocabulary."""


class Made(NamedTuple):
    """`reading` is of the saying's numbers, the decoder's count of saturated ones, and whether each row is finite."""

    passed: Pass
    saying: Saying | None
    reading: Reading


class CudaPasses:
    """`catch_up` ends the step before, if that has not ended."""

    def __init__(self, forward: Forward, speaker: Speaker, catch_up: Callable[[], None]) -> None:
        self._forward, self._speaker, self._catch_up = forward, speaker, catch_up
        self.saturated = 0
        """Numbers that KV in fp8 had no room for."""

    def begin(self, runs: Runs, drafts: list[Draft], asked: Asked) -> Made:
        batch = of_runs(runs, drafts if asked.guessed else None, self._forward.decoder.block_size)
        passed = self._forward.run(batch)
        if not len(asked.rows):
            return Made(passed, None, Reading(torch.cat((self._forward.decoder.saturated, passed.finite))))
        if self._speaker.waits(asked):
            self._catch_up()
        saying = self._speaker.begin(asked, self._forward.logits(passed, asked.all_rows))
        if len(saying.drawn) <= SAID and not saying.guessed:
            self._forward.decoder.said[: len(saying.drawn)].copy_(saying.numbers)
        return Made(
            passed, saying, Reading(torch.cat((saying.numbers, self._forward.decoder.saturated, passed.finite)))
        )

    def unknown(self, begun: Begun[Made]) -> list[int] | None:
        """What stands for the tokens of the runs that sample, until they are known; None if the next step cannot begin
        before that: how many there are is not known, or the pass is needed for more."""
        if begun.asked.guessed or begun.prompts:
            return None
        saying = None if begun.made is None else begun.made.saying
        drawn: Sequence[int] = () if saying is None else saying.drawn
        if len(drawn) > SAID:
            return None
        if len(drawn) == len(begun.runs):
            return list(range(-SAID, len(drawn) - SAID))
        places = {begun.asking[j]: k - SAID for k, j in enumerate(drawn)}
        return [places.get(i, 0) for i in np.flatnonzero(begun.runs.samples).tolist()]

    def finite(self, made: Made) -> list[int]:
        told, rows = made.reading.wait(), len(made.passed.finite)
        self.saturated += (told[-rows - 1] - self.saturated) % 2**32
        return told[-rows:]

    def say(self, made: Made, asked: Asked, heard: Sequence[int]) -> Outcomes:
        assert made.saying is not None  # somebody asked
        return self._speaker.end(made.saying, made.reading.wait()[: len(made.saying.numbers)], asked, heard)

    def prompt(self, made: Made, run: Run, rows: range) -> list[TokenLogprob]:
        after, wanted = run.resident.tokens[run.start + 1 :], run.resident.sampling.prompt_logprobs
        return [
            logprob(row, after[at + i], wanted)
            for at in range(0, len(rows), PROMPT_ROWS)
            for i, row in enumerate(self._forward.logits(made.passed, list(rows[at : at + PROMPT_ROWS])).cpu().numpy())
        ]

    def straighten(self, branched: list[tuple[Run, list[int]]]) -> None:
        decoder = self._forward.decoder
        tables = [(run.resident.table, run.start, np.array(rows)) for run, rows in branched]
        size = decoder.block_size
        at = mirrored(
            decoder.kernels.device,
            {
                "source": np.concatenate([slots_of(table, start + rows, size) for table, start, rows in tables]),
                "target": np.concatenate(
                    [slots_of(table, start + np.arange(len(rows)), size) for table, start, rows in tables]
                ),
            },
        )
        decoder.move(at["source"], at["target"])

    def states(self, made: Made, rows: list[int]) -> tuple[Tensor, Tensor | None]:
        where = mirrored(made.passed.hidden.device, {"rows": np.array(rows, dtype=np.int64)})["rows"]
        inner = made.passed.inner
        return made.passed.hidden[where], None if inner is None else inner[where]
