"""The tokenizer's process: its core in the common shell."""

from __future__ import annotations

from pathlib import Path

from octavo.core.actor import CoreActor
from octavo.core.config.schema import Config
from octavo.core.grammar import GROUP
from octavo.core.messages import Facts, Role
from octavo.core.models.locate import locate
from octavo.core.plugins import resolve
from octavo.core.tokenizer.core import TokenizerCore
from octavo.core.tokenizer.vocabulary import load_vocabulary


def build(config: Config, facts: Facts) -> TokenizerCore:
    """A core for the configured model. Raises `ModelError` when its tokenizer cannot be loaded."""
    grammars = resolve(GROUP, config.executor.grammar)() if "grammar" in facts.serves else None
    return TokenizerCore(load_vocabulary(locate(config.model.path)), facts, grammars)


def stats(core: TokenizerCore) -> dict[str, int]:
    return {"live": core.live}


def run(config: Config, run_dir: Path, generation: int) -> None:
    """Until the supervisor says Shutdown."""
    CoreActor(
        config,
        run_dir,
        Role.TOKENIZER,
        generation,
        make=lambda facts, _state, _clock: build(config, facts),
        stats=stats,
    ).run()
