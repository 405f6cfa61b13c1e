"""How a drafter is chosen: one key is enough, and what is not installed is refused before anything starts."""

from __future__ import annotations

import pytest

from octavo.core.config.load import ConfigError, leaves, load


def test_whoever_chooses_a_drafter_gets_guesses() -> None:
    assert load().config.policies.speculation == "off"
    loaded = load(sets=["speculation.drafter=ngram", "speculation.options.longest=3"])
    assert loaded.config.policies.speculation == "adaptive"
    assert loaded.origin["policies.speculation"] == "speculation.drafter"
    assert dict(leaves(loaded.config))["speculation.options.longest"] == 3
    said = load(sets=["speculation.drafter=ngram", "policies.speculation=off"])
    assert said.config.policies.speculation == "off"


def test_a_drafter_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.drafter.*'psychic'; installed: .*ngram"):
        load(sets=["speculation.drafter=psychic"])
    with pytest.raises(ConfigError, match="coupled, rejection"):
        load(sets=["speculation.verification=hope"])
