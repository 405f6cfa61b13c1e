"""What a drafter is to an executor: it guesses what a resident says next. Whatever it guesses, the answer stays what
it would be without it (see `verification`); a bad guess costs time, nothing else.

    draft ──▶ one pass over the last token and the guesses ──▶ verify ──▶ took
    (guesses)                                        (what is right)   (what was computed)

Guesses are made at the start of the step that verifies them: steps are planned ahead of results, and only then is the
executor's own last token known. A drafter lives in the executor's process, is called from one thread, and must be a
function of what it was told: no clock, no generator of its own. What it remembers of a resident it should hold by a
weak reference to it: residents come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from octavo.core.config.schema import Config
from octavo.core.messages import Facts, StepBind
from octavo.executors.residents import Resident, Span
from octavo.executors.sampling import Logits, Reals

if TYPE_CHECKING:  # an executor without torch has no use for it here
    from torch import Tensor

GROUP = "octavo.drafter"
WHOLE = "executor.kind = native, cpu or cuda"
"""Executors that offer all of a `Host` but, on some models, `trees`: for words of refusal."""


class DrafterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a drafter's `Options`: typed fields with defaults, filled from `speculation.options`."""


class Want(NamedTuple):
    """A resident that decodes in this step, and for how many guesses there is room (at least 1)."""

    resident: Resident
    most: int


class Draft(NamedTuple):
    """Guesses for the tokens after a resident's last one. `chances` [len(tokens), vocab] are the distributions that
    they were drawn from; None where each was certain given those before it. Only the rule `rejection` reads them.

    Guesses are a chain, or a tree (only where `Host.trees`): then guess i comes after guess `parents[i]` < i, or after
    the last token (-1). Guesses with one parent should differ; one is drawn given those of that parent before it."""

    tokens: Sequence[int] = ()
    chances: Reals | None = None
    parents: Sequence[int] | None = None


NO_DRAFT = Draft()


class Took(NamedTuple):
    """What a step computed for a resident, told once its new tokens are among its own: the last hidden states (after
    the final norm) of positions [start, start + len(hidden)). All these positions stay. `inner` are the inputs of the
    layers that the drafter `taps`, side by side: [len(hidden), taps · hidden]."""

    resident: Resident
    start: int
    hidden: Tensor
    inner: Tensor | None = None


class Stack(Protocol):
    """A model that computes over the executor's blocks, with KV of its own: position p of a sequence is in block
    p // size of its table. What is written for one call's spans is there in the next."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The longest text it can compute, in tokens."""
        ...

    @property
    def layers(self) -> int: ...

    @property
    def width(self) -> int:
        """Of a hidden state."""
        ...

    def after(self, spans: Sequence[Span], layers: int | None = None) -> Logits:
        """Write the spans' KV and give what comes after each: logits [spans, vocab]. With `layers` only the first so
        many are computed and written, and stand for all."""
        ...

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Embeddings [len(ids), hidden], fp32."""
        ...

    def hidden(self, spans: Sequence[Span], layers: int | None = None) -> Tensor:
        """As `after`, but give the last hidden states of all tokens [tokens, hidden], after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab], fp32."""
        ...

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """As if all were read before any is written."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """What an executor offers to its drafter: the `target` that is drafted for, and to `open` another model (a path as
    in `model.path`) over the same blocks. None where it does not offer that. `trees` says whether it verifies them,
    `taps` whether it tells what layers are given. Who keeps bytes of its own for each token of the pool says how many
    to `claim`: it raises `ModelError` without room. What a drafter computes with of its own goes to `device` (torch's
    name of it), where the target's tensors are."""

    config: Config
    facts: Facts
    target: Stack | None = None
    open: Callable[[str], Stack] | None = None
    trees: bool = False
    claim: Callable[[int], None] | None = None
    taps: bool = False
    device: str = "cpu"


class Drafter:
    """Base of drafters, entry-point group `octavo.drafter`; made as `Class(host, options)`. What its methods raise
    costs it the guesses of a step, and the third time all of them: answers go on without.

    Making it raises `ModelError` when it cannot draft for this model or with what this executor offers."""

    Options: ClassVar[type[DrafterOptions]] = DrafterOptions
    features: ClassVar[bool] = False
    """Whether it is to be told `took`. An executor that cannot tell refuses it."""
    taps: Sequence[int] = ()
    """Layers of the target whose inputs are told with it. Only where the host has `taps`."""

    def __init__(self, host: Host, options: Any) -> None:
        """`options` are of the class's own `Options`."""

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """One for each of `wants`, at most `most` tokens. Fewer, or none, are right where nothing is known."""
        raise NotImplementedError

    def bound(self, bind: StepBind) -> None:
        """A step is about to run: the tables of residents are as it says, its copies are made in the target's
        blocks, and for the drafter to repeat in its own."""

    def took(self, took: Sequence[Took]) -> None:
        """After the step; only if it has `features`."""

    def left(self, resident: Resident) -> None:
        """It gave up its slot; its tokens are all that it said."""

    def forget(self) -> None:
        """Nothing is resident any more, and no KV counts."""
