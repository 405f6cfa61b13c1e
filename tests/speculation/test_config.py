"""How a drafter is chosen: none needs to be, one key is enough, and what is not installed is refused at once."""

from __future__ import annotations

import pytest

from octavo.core.config.load import ConfigError, leaves, load
from octavo.core.policy import load_policies
from octavo.executors.drafting.drafting import settled
from octavo.executors.ghost import GhostExecutor


@pytest.mark.parametrize(
    ("sets", "drafter", "policy"),
    [
        ([], "ngram", "adaptive"),
        (["policies.speculation=fixed"], "ngram", "fixed"),
        (["policies.speculation=off"], None, "off"),
        (["policies.speculation=off", "speculation.drafter=suffix"], "suffix", "off"),
        (["speculation.drafter=suffix"], "suffix", "adaptive"),
    ],
)
def test_guesses_are_on_where_an_executor_has_a_drafter_of_its_own(
    sets: list[str], drafter: str | None, policy: str
) -> None:
    config = settled(load(sets=sets).config, "ngram")
    assert config.speculation.drafter == drafter
    guesses = config.speculation.drafter is not None
    assert load_policies(config.policies, guesses=guesses).names["speculation"] == policy


def test_elsewhere_nobody_guesses_and_what_was_meant_for_guesses_is_in_nobodys_way() -> None:
    sets = ["policies.options.speculation.most=3", "speculation.options.longest=3"]
    config = settled(load(sets=sets).config)
    assert config.speculation.drafter is None
    assert load_policies(config.policies).names["speculation"] == "off"
    assert dict(leaves(config))["speculation.options.longest"] == 3
    with pytest.raises(ConfigError, match=r"policies\.options\.speculation\.tokens"):
        load(sets=["policies.options.speculation.tokens=3"])  # of `fixed`


@pytest.mark.parametrize(
    ("sets", "policy"),
    [([], "off"), (["speculation.drafter=ngram"], "adaptive"), (["policies.speculation=off"], "off")],
)
def test_the_ghost_guesses_where_a_drafter_is_named(sets: list[str], policy: str) -> None:
    config = load(sets=["model.path=ghost", *sets]).config
    guesses = bool(GhostExecutor.load(config).facts.drafter)
    assert load_policies(config.policies, guesses=guesses).names["speculation"] == policy


def test_a_drafter_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.drafter.*'psychic'; installed: .*ngram"):
        load(sets=["speculation.drafter=psychic"])
    with pytest.raises(ConfigError, match="coupled, rejection"):
        load(sets=["speculation.verification=hope"])
