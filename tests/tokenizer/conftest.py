"""The two vocabularies that tests use: the default model's, and the ghost's."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from octavo.core.models.locate import locate
from octavo.core.tokenizer.alphabet import CHAR_OF_BYTE
from octavo.core.tokenizer.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def smollm() -> Vocabulary:
    """The default model's; fetched if this machine does not have it yet."""
    return load_vocabulary(locate("default"))


@pytest.fixture(scope="session")
def ghost() -> Vocabulary:
    return load_vocabulary(locate("ghost"))


@pytest.fixture(params=["smollm", "ghost"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    found: Vocabulary = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def texts(vocabulary: Vocabulary) -> st.SearchStrategy[str]:
    """Any text whose bytes the vocabulary has. SmolLM2's lacks a few (most control characters, the highest planes),
    and loses them as llama.cpp does."""
    known = {byte for byte, char in CHAR_OF_BYTE.items() if vocabulary.tokenizer.token_to_id(char) is not None}
    assert len(known) > 220
    return st.text().map(lambda text: "".join(char for char in text if known.issuperset(char.encode())))
