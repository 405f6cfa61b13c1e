"""Detokenising one by one gives the text of decoding all at once, in whole characters, from wherever it is taken up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from octavo.core.tokenizer.detokenize import Detokenizer, Piece
from octavo.core.tokenizer.vocabulary import Vocabulary

EMOJI = ["ok 👍🏽 done", "👩‍👩‍👧‍👦👨‍🚀", "🇩🇪🇯🇵", "你好,世界。日本語", "ñ é ü", "한국어", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "e\u0301"]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[Piece]:
    found = [piece for token in ids if (piece := detokenizer.feed(token))]
    last = detokenizer.flush()
    return found + ([last] if last else [])


def test_pieces_are_all_ids_and_the_text_of_them_all(vocabulary: Vocabulary) -> None:
    tokens = st.integers(0, vocabulary.size + 3)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(tokens, max_size=40), st.lists(tokens, max_size=5), st.booleans())
    def holds(ids: list[int], before: list[int], skip: bool) -> None:
        found = pieces(Detokenizer(vocabulary, before, skip), ids)
        assert [token for piece in found for token in piece.ids] == ids
        assert "".join(piece.text for piece in found) == vocabulary.decode(ids, skip)

    holds()


def test_it_can_be_taken_up_after_any_piece(vocabulary: Vocabulary) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, vocabulary.size - 1), max_size=30), st.booleans())
    def holds(ids: list[int], skip: bool) -> None:
        whole = pieces(Detokenizer(vocabulary, [], skip), ids)
        done: list[int] = []
        for i, piece in enumerate(whole):
            assert pieces(Detokenizer(vocabulary, done, skip), ids[len(done) :]) == whole[i:]
            done += piece.ids

    holds()


@pytest.mark.parametrize("text", EMOJI)
def test_no_piece_has_half_a_character(vocabulary: Vocabulary, text: str) -> None:
    found = pieces(Detokenizer(vocabulary, [], True), vocabulary.encode(text))
    assert "".join(piece.text for piece in found) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in found)


def test_a_character_that_never_ends_is_given_at_the_end(ghost: Vocabulary) -> None:
    detokenizer = Detokenizer(ghost, [], True)
    assert [detokenizer.feed(byte) for byte in "👍".encode()[:3]] == [None] * 3
    assert detokenizer.flush() == Piece([*"👍".encode()[:3]], "\N{REPLACEMENT CHARACTER}")
    assert detokenizer.flush() is None


def test_skipped_special_tokens_do_not_wait_for_text(ghost: Vocabulary) -> None:
    detokenizer = Detokenizer(ghost, [], skip_special_tokens=True)
    assert detokenizer.feed(257) == Piece([257], "")
    assert Detokenizer(ghost, [], skip_special_tokens=False).feed(257) == Piece([257], "<|end|>")


@pytest.fixture(scope="module")
def sentencepiece_like() -> Vocabulary:
    """Words with their space before them, and bytes for what has no word: a decoder that looks around."""
    words = ["▁hello", "▁world", "s", "▁", "!"]
    names = [f"<0x{byte:02X}>" for byte in range(256)] + words
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary(tokenizer, [], None)


def test_a_space_is_dropped_at_the_start_of_a_text_only(sentencepiece_like: Vocabulary) -> None:
    hello, world = 256, 257
    assert pieces(Detokenizer(sentencepiece_like, [], True), [hello, world])[0].text == "hello"
    assert pieces(Detokenizer(sentencepiece_like, [hello], True), [world])[0].text == " world"
    assert pieces(Detokenizer(sentencepiece_like, [hello, 0xE4], True), [world])[0].text == " world"
    assert sentencepiece_like.token_bytes(world) == b" world"
    assert sentencepiece_like.token_bytes(0xE4) == b"\xe4"


def test_bytes_that_turn_out_wrong_lose_no_ids_and_end_nothing(sentencepiece_like: Vocabulary) -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from([0xE4, 0xBD, 0xA0, 0x61, 256, 257, 258, 259]), max_size=20))
    def holds(ids: list[int]) -> None:
        found = pieces(Detokenizer(sentencepiece_like, [256], True), ids)
        assert [token for piece in found for token in piece.ids] == ids

    holds()
    taken_back = [*"你".encode(), 0xE4, 258]
    assert "".join(p.text for p in pieces(Detokenizer(sentencepiece_like, [256], True), taken_back)).startswith("你")
