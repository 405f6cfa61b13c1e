"""The grammars of an executor's residents: where each answer is in its own.

A matcher is made from a resident's tokens when it is first asked for, and follows them: so it needs nothing to be
carried over a preemption, a fork or a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from octavo.core.config.schema import Config
from octavo.core.grammar import GROUP, Engine, GrammarError, Grammars, Mask, Matcher
from octavo.core.messages import Grammar
from octavo.core.models.errors import ModelError
from octavo.core.models.locate import ModelFiles
from octavo.core.plugins import resolve
from octavo.executors.residents import Resident


class Matchers:
    """`grammars` is None where no grammar is served: then nobody may ask for one."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._followed: WeakKeyDictionary[Resident, tuple[Matcher, int]] = WeakKeyDictionary()
        """The matcher, and how many of the resident's tokens it has taken."""

    def mask(self, resident: Resident, new: Sequence[int] = ()) -> Mask | None:
        """What may come next for it, after its tokens and the `new` ones that are to be among them; None if it has no
        grammar. Raises `GrammarError`."""
        grammar = resident.sampling.grammar
        if grammar is None or self._grammars is None:
            return None
        matcher, taken = self._followed.get(resident) or (self._grammars.start(grammar), resident.prompt_len)
        known = len(resident.tokens)
        matcher.take([*resident.tokens[taken:], *new[max(0, taken - known) :]])
        self._followed[resident] = (matcher, known + len(new))
        return matcher.mask()


class Deferred:
    """An engine that reads the model's vocabulary when the first grammar is asked for: that takes half a second and
    fifty megabytes, which most services never need."""

    def __init__(self, engine: Engine, model: str, vocab_size: int) -> None:
        self._engine, self._model, self._vocab_size = engine, model, vocab_size
        self._loaded: Grammars | None = None

    def start(self, grammar: Grammar) -> Matcher:
        if self._loaded is None:
            try:
                self._loaded = self._engine.load(self._model, self._vocab_size)
            except ModelError as error:
                raise GrammarError(f"no grammar can be followed: {error}") from error
        return self._loaded.start(grammar)


def grammars_of(config: Config, files: ModelFiles, vocab_size: int) -> Grammars | None:
    """As the configuration says; None for a model that has no tokenizer: it answers in ids, which no grammar is about.
    Raises `PluginError`."""
    if not has_tokenizer(files):
        return None
    return Deferred(resolve(GROUP, config.executor.grammar)(), config.model.path, vocab_size)


def has_tokenizer(files: ModelFiles) -> bool:
    return files.kind == "gguf" or (files.path is not None and (files.path / "tokenizer.json").is_file())
