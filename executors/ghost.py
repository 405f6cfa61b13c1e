"""An executor without a model: each KV cell holds a hash of the prefix it stands for, and every read is checked.

If the kernel ever lets two sequences share what they must not, reuses a block too early, or loses a write, the
ghost sees it. Its tokens are a function of the prefix (and of seed and choice when sampled), so an answer is the
same whatever was preempted, forked, recovered or batched. For tests, simulation, and a daemon with no weights.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary

import numpy as np

from octavo.core.config.schema import Config
from octavo.core.messages import (
    EMPTY,
    Adapter,
    ChunkLogprobs,
    Facts,
    Sampling,
    StepBind,
    StepPlan,
    StepResult,
    TokenLogprob,
    col,
)
from octavo.core.models.errors import ModelError
from octavo.executors.adapters import Adapters, Content
from octavo.executors.drafting.drafting import settled
from octavo.executors.residents import Resident, Residents, Run, of_prompt
from octavo.executors.rounds import always, in_rounds

_MASK = (1 << 63) - 1
_START = 0x0C7A_0C7A

FIRST_TOKEN, ALPHABET, EOS = 97, 26, 257
"""The ghost writes letters (token ids are bytes) and now and then its end token."""


def start_of(adapter: Adapter | None) -> int:
    """What a prefix starts from: with another adapter every cell is another, as it is in a model."""
    return _START if adapter is None else mix(_START, int.from_bytes(adapter.digest[:7], "big"))


class KvCorruption(AssertionError):
    """A read found another prefix than its own in a KV cell."""


def mix(prefix: int, token: int) -> int:
    """Hash of a prefix and one more token; 63 bits."""
    x = (prefix ^ (token + 0x9E37_79B9_7F4A_7C15)) * 0xBF58_476D_1CE4_E5B9 & _MASK
    return x ^ (x >> 29)


def prefix_hashes(tokens: list[int], start: int = _START) -> list[int]:
    """`hashes[i]` stands for tokens [0, i]."""
    out = []
    for token in tokens:
        start = mix(start, token)
        out.append(start)
    return out


def next_token(prefix: int, sampling: Sampling, choice: int, eos_one_in: int) -> int:
    """The token the ghost writes after a prefix."""
    h = prefix if sampling.temperature == 0 else mix(mix(prefix, sampling.seed), choice)
    h = mix(h, 1)
    if eos_one_in and h % eos_one_in == 0:
        return EOS
    return FIRST_TOKEN + (h >> 7) % ALPHABET


def prompt_logprob(prefix: int, token: int) -> TokenLogprob:
    """What the ghost says of a prompt's token after a prefix."""
    value = -(mix(prefix, 3) % 4096) / 512
    return TokenLogprob(token, value, [token], [value])


def _ghostly(path: Path) -> Content:
    """An adapter is whatever is there: a file, or the files of a folder. Raises `ModelError` if nothing is."""
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file())
    if not files:
        raise ModelError(f"{path} is no adapter: there is no file")
    return Content(hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()[:16])


class GhostExecutor:
    """Runs bound steps over ghost memory, shape [blocks, block size] of int64 prefix hashes."""

    def __init__(self, facts: Facts, *, eos_one_in: int = 0) -> None:
        self.facts = facts
        self.residents = Residents()
        self.memory = np.full((facts.places, facts.block_size), -1, dtype=np.int64)
        self.reads_checked = 0
        self.go_on = always
        self.adapters = Adapters(_ghostly, lambda content: None, self.residents.adapters)
        self._eos_one_in = eos_one_in
        self._hashes: WeakKeyDictionary[Resident, list[int]] = WeakKeyDictionary()
        """The prefix hashes of each resident's tokens."""

    @classmethod
    def load(cls, config: Config) -> Self:
        block_size = config.kv.block_size
        facts = Facts(
            model_id=config.model.name or "ghost",
            context=config.model.context or 8192,
            vocab_size=260,
            block_size=block_size,
            total_blocks=config.kv.tokens // block_size,
            host_blocks=config.kv.host_tokens // block_size,
            block_bytes=block_size * 8,
            cache_seed=b"ghost",
            drafter=settled(config).speculation.drafter or "",
            serves=("prompt_logprobs", "restrictions", "adapters", "rounds"),
        )
        return cls(facts, eos_one_in=0)

    @property
    def stats(self) -> dict[str, int]:
        return {}

    def forget(self) -> None:
        self.residents.clear()

    def execute(self, plan: StepPlan, bind: StepBind) -> StepResult:
        started = time.monotonic_ns()
        runs = self.residents.apply(plan, bind)
        self.memory[bind.copy_dst] = self.memory[bind.copy_src]
        return in_rounds(runs, plan.rounds, lambda on: self._pass(plan.step, started, list(on)), self.go_on)

    def _pass(self, step: int, started_ns: int, runs: list[Run]) -> StepResult:
        produced = [self._execute(run) for run in runs]
        return StepResult(
            step=step,
            slot=col([run.slot for run in runs]),
            open_id=col([run.resident.open_id for run in runs]),
            n_new=col([len(tokens) for tokens in produced]),
            tokens=col([token for tokens in produced for token in tokens]),
            kv_len=col([run.resident.kv_len for run in runs]),
            drafted=col([run.drafts for run in runs]) if any(run.drafts for run in runs) else EMPTY,
            started_ns=started_ns,
            finished_ns=time.monotonic_ns(),
            logprobs=self._logprobs(runs, produced),
            prompts=[
                ChunkLogprobs(
                    run.resident.open_id,
                    run.start + 1,
                    [self._prompt_logprob(run, position) for position in of_prompt(run)],
                )
                for run in runs
                if of_prompt(run)
            ],
        )

    def _prompt_logprob(self, run: Run, position: int) -> TokenLogprob:
        """Of the token after `position`: a function of the prefix before it, like all that the ghost says."""
        token = run.resident.tokens[position + 1]
        return prompt_logprob(self._hashes[run.resident][position], token)

    def _execute(self, run: Run) -> list[int]:
        resident = run.resident
        hashes = self._hashes.setdefault(resident, [])
        if (known := len(hashes)) < len(resident.tokens):
            start = hashes[-1] if hashes else start_of(resident.adapter)
            hashes += prefix_hashes(self._told_apart(resident.tokens[known:], resident.prompt_len - known), start)
        self._check(run, hashes)
        for position in range(run.start, run.end):
            self._write(run, position, hashes[position])
        resident.kv_len = run.end
        if not run.samples:
            return []
        produced = self._sample(run, hashes)
        resident.tokens += produced
        hashes += prefix_hashes(self._told_apart(produced, 0), hashes[-1])
        resident.kv_len = len(resident.tokens) - 1
        return produced

    def _told_apart(self, tokens: list[int], prompt_len: int) -> list[int]:
        """Those behind a prompt as ~token, if their cells are to be others than a prompt's."""
        first = max(prompt_len, 0) if self.facts.prompts_apart else len(tokens)
        return tokens[:first] + [~token for token in tokens[first:]]

    def _check(self, run: Run, hashes: list[int]) -> None:
        if run.start == 0:
            return
        size = self.facts.block_size
        positions = np.arange(run.start)
        table = np.asarray(run.resident.table)
        found = self.memory[table[positions // size], positions % size]
        wrong = np.flatnonzero(found != np.asarray(hashes[: run.start], dtype=np.int64))
        self.reads_checked += run.start
        if len(wrong):
            at = int(wrong[0])
            raise KvCorruption(
                f"slot {run.slot} (open {run.resident.open_id}) read position {at} in block {table[at // size]}: "
                f"it holds another prefix"
            )

    def _write(self, run: Run, position: int, value: int) -> None:
        size = self.facts.block_size
        self.memory[run.resident.table[position // size], position % size] = value

    def _sample(self, run: Run, hashes: list[int]) -> list[int]:
        """The next token, and after a decode with drafts as many more as were drafted right."""
        resident = run.resident
        prefix = hashes[-1]
        right = mix(prefix, 2) % (run.drafts + 1)
        produced = []
        for i in range(run.drafts + 1):
            token = next_token(prefix, resident.sampling, resident.choice, self._eos_one_in)
            produced.append(token)
            if i == run.drafts:
                break
            draft = token if i < right else token + 1
            prefix = prefix_hashes(self._told_apart([draft], 0), prefix)[0]
            self._write(run, run.end + i, prefix)
            if i >= right:  # rejected: its KV is garbage that nobody may read
                break
        return produced

    def _logprobs(self, runs: list[Run], produced: list[list[int]]) -> list[TokenLogprob | None] | None:
        if all(run.resident.sampling.logprobs < 0 for run in runs):
            return None
        return [
            TokenLogprob(token, 0.0, [token], [0.0]) if run.resident.sampling.logprobs >= 0 else None
            for run, tokens in zip(runs, produced, strict=True)
            for token in tokens
        ]
