"""Tokens and log-probabilities by the step library: all rows of a step in one call, on the model's threads.

They are the sampler's own (`executors.sampling`), in a fraction of the time; `kernels/cpu/sample.h` says where float
rounding can differ. What is left to the sampler is the rule `rejection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from octavo.core.messages import Sampling, TokenLogprob
from octavo.executors.native.library import DRAW, LIKELY, Floats, Int32s
from octavo.executors.native.program import Native
from octavo.executors.residents import Resident
from octavo.executors.sampling import LEAST_LOGPROB, Context, follows, penalised


class Draws(NamedTuple):
    """Rows of logits [n, vocabulary] of a sequence: of its last token, and of each of the guesses after it."""

    resident: Resident
    logits: Floats
    guesses: Sequence[int] = ()


class Reported(NamedTuple):
    """A row of logits, and the token that it is asked about, with how many alternatives."""

    logits: Floats
    token: int
    alternatives: int


class _Asked:
    """What stays the same for a sequence as long as it is resident. `ids` has room for tokens to come."""

    __slots__ = ("_held", "bans", "ids", "known", "options")

    def __init__(self, sampling: Sampling, choice: int, prompt_len: int, vocabulary: int) -> None:
        self.options = np.zeros((), dtype=DRAW)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "repetition",
            "presence",
            "frequency",
            "seed",
            "top_k",
        ):
            self.options[name] = getattr(sampling, name)
        self.options["choice"], self.options["prompt"] = choice, prompt_len
        bias = [(token, value) for token, value in sampling.bias.items() if 0 <= token < vocabulary]
        bias_ids = np.array([token for token, _ in bias], dtype=np.int32)
        values = np.array([value for _, value in bias], dtype=np.float64)
        allowed = np.array([token for token in sampling.allowed if 0 <= token < vocabulary], dtype=np.int32)
        self._held = bias_ids, values, allowed  # the library has their addresses
        self.options["bias_ids"], self.options["bias"] = bias_ids.ctypes.data, values.ctypes.data
        self.options["allowed"] = allowed.ctypes.data
        self.options["biases"], self.options["allowed_count"] = len(bias_ids), len(allowed)
        self.ids: Int32s | None = np.empty(0, dtype=np.int32) if penalised(sampling) else None
        self.known = 0
        self.bans = bool(sampling.banned or sampling.min_tokens)

    def follow(self, tokens: list[int], guesses: Sequence[int]) -> None:
        """Have `ids` begin with them."""
        if self.ids is None:
            return
        if (needed := len(tokens) + len(guesses)) > len(self.ids):
            longer = np.empty(2 * needed, dtype=np.int32)
            longer[: self.known] = self.ids[: self.known]
            self.ids = longer
        self.ids[self.known : len(tokens)] = tokens[self.known :]
        self.ids[len(tokens) : needed] = guesses
        self.known = len(tokens)

    def banned(self, context: Context, vocabulary: int) -> Int32s | None:
        """What may not come next."""
        if not self.bans:
            return None
        sampling = context.sampling
        banned = {word[-1] for word in sampling.banned if follows(context.ids, word[:-1])}
        if len(context.ids) - context.prompt_len < sampling.min_tokens:
            banned.update(sampling.ends)
        return np.array(sorted(token for token in banned if 0 <= token < vocabulary), dtype=np.int32)


class Drawing:
    def __init__(self, model: Native) -> None:
        self._model = model
        self._vocabulary = model.weights.spec.vocab_size
        self._asked: WeakKeyDictionary[Resident, _Asked] = WeakKeyDictionary()

    def draw(self, asks: Sequence[Draws]) -> list[list[int]]:
        """By ask, the token of each row, with the guesses before it for context. Logits must be finite."""
        table = np.zeros(sum(len(ask.logits) for ask in asks), dtype=DRAW)
        held: list[Int32s] = []
        at = 0
        for resident, logits, guesses in asks:
            asked = self._options(resident)
            asked.follow(resident.tokens, guesses)
            known, n = len(resident.tokens), len(logits)
            part = table[at : at + n]
            part[:] = asked.options
            part["logits"] = logits.ctypes.data + logits.strides[0] * np.arange(n, dtype=np.uint64)
            part["position"] = np.arange(known, known + n)
            if asked.ids is not None:
                part["ids"] = asked.ids.ctypes.data
            for i in range(n) if asked.bans else ():
                ids = [*resident.tokens, *guesses[:i]] if i else resident.tokens
                context = Context(resident.sampling, resident.choice, resident.prompt_len, ids)
                if (banned := asked.banned(context, self._vocabulary)) is not None:
                    held.append(banned)
                    part["banned"][i], part["banned_count"][i] = banned.ctypes.data, len(banned)
            at += n
        self._call("oct_sample", table)
        tokens = iter(table["token"].tolist())
        return [[next(tokens) for _ in ask.logits] for ask in asks]

    def sample(self, logits: Floats, context: Context) -> int:
        """As `executors.sampling.sample`."""
        asked = _Asked(context.sampling, context.choice, context.prompt_len, self._vocabulary)
        asked.follow(context.ids, ())
        logits = np.ascontiguousarray(logits)
        table = np.full(1, asked.options)
        table["logits"], table["position"] = logits.ctypes.data, len(context.ids)
        if asked.ids is not None:
            table["ids"] = asked.ids.ctypes.data
        if (banned := asked.banned(context, self._vocabulary)) is not None:
            table["banned"], table["banned_count"] = banned.ctypes.data, len(banned)
        if context.mask is not None:
            mask = np.ascontiguousarray(context.mask)
            table["mask"] = mask.ctypes.data
        self._call("oct_sample", table)
        return int(table["token"][0])

    def likely(self, asks: Sequence[Reported]) -> list[TokenLogprob]:
        """As `executors.sampling.logprob`."""
        counts = [max(0, min(ask.alternatives, self._vocabulary)) for ask in asks]
        most = max(counts, default=0)
        ids, values = np.zeros((len(asks), most), np.int32), np.zeros((len(asks), most))
        table = np.zeros(len(asks), dtype=LIKELY)
        rows = np.arange(len(asks), dtype=np.uint64)
        table["logits"] = [ask.logits.ctypes.data for ask in asks]
        table["ids"], table["values"] = (
            ids.ctypes.data + rows * ids.strides[0],
            values.ctypes.data + rows * values.strides[0],
        )
        table["least"], table["token"], table["alternatives"] = LEAST_LOGPROB, [ask.token for ask in asks], counts
        self._call("oct_likely", table)
        found = zip(asks, table["logprob"].tolist(), ids.tolist(), values.tolist(), counts, strict=True)
        return [TokenLogprob(ask.token, mine, best[:n], those[:n]) for ask, mine, best, those, n in found]

    def _options(self, resident: Resident) -> _Asked:
        if (found := self._asked.get(resident)) is None:
            found = _Asked(resident.sampling, resident.choice, resident.prompt_len, self._vocabulary)
            self._asked[resident] = found
        return found

    def _call(self, function: str, table: npt.NDArray[np.void]) -> None:
        self._model.rows(function, table)
