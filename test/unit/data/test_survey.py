"""Words and tags of captions, as the page of a dataset counts them."""

from __future__ import annotations

import pytest

from difftrain.data.index.survey import tags_of, words_of


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A cat and a CAT on the mat.", {"cat", "mat"}),
        ("it's a well-known café, 1girl", {"it's", "well-known", "café", "girl"}),
        ("<b>x</b> 42 --", set()),
        ("白い猫", {"白い", "い猫"}),
        ("", set()),
    ],
)
def test_words_are_counted_once_a_caption(caption: str, words: set[str]) -> None:
    assert words_of(caption) == words


def test_tags_stand_between_commas() -> None:
    assert tags_of("1girl, long hair,, smile ") == {"1girl", "long hair", "smile"}
    assert tags_of("one sentence") == set() and tags_of(f"a, {'b' * 99}") == {"a"}
