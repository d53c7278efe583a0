"""Captions: kohya's meaning, and draws that only the record's use decides."""

from collections import Counter

from difftrain.config import CaptionSection
from difftrain.contracts import MediaRef, Record
from difftrain.data.captions import caption_of
from difftrain.diffusion.draws import Stream

TAGS = "1girl, solo, red hair, sky, cat, tree"


def draw(captions=(TAGS,), epoch=0, occurrence=0, **settings):
    record = Record(0, b"k" * 16, MediaRef(0, "a.png"), tuple(captions), (64, 64))
    return caption_of(record, Stream(1, record.key, occurrence, "caption"), CaptionSection(**settings), epoch)


def test_untouched_without_options():
    assert draw(["  as, it   is ,"]) == "  as, it   is ,"


def test_shuffling_keeps_all_tags_and_the_first_ones_in_front():
    seen = {draw(shuffle=True, keep_tokens=2, occurrence=use) for use in range(200)}
    assert len(seen) == 24  # every order of the four loose tags
    for caption in seen:
        tags = caption.split(", ")
        assert tags[:2] == ["1girl", "solo"] and sorted(tags) == sorted(TAGS.split(", "))


def test_all_orders_are_equally_likely():
    counts = Counter(draw(["a, b, c"], shuffle=True, occurrence=use) for use in range(6000))
    assert len(counts) == 6 and all(850 < count < 1150 for count in counts.values())


def test_another_separator_splits_but_commas_join_as_in_kohya():
    assert sorted(draw(["a; b ;c"], shuffle=True, separator=";").split(", ")) == ["a", "b", "c"]


def test_keeping_more_tags_than_there_are():
    assert draw(shuffle=True, keep_tokens=50, tag_dropout_rate=1.0) == TAGS


def test_dropout_rate():
    empty = sum(draw(dropout_rate=0.1, occurrence=use) == "" for use in range(5000))
    assert 420 < empty < 580
    assert draw(dropout_rate=1.0) == "" and draw(dropout_rate=0.0) == TAGS


def test_dropout_every_n_epochs_counts_from_one():
    assert [draw(dropout_every_n_epochs=3, epoch=epoch) == "" for epoch in range(7)] == [False, False, True] * 2 + [
        False
    ]
    assert all(draw(dropout_every_n_epochs=1, epoch=epoch) == "" for epoch in range(3))


def test_tag_dropout_spares_the_kept_ones_and_keeps_the_order():
    kept = Counter()
    for use in range(3000):
        tags = draw(tag_dropout_rate=0.25, keep_tokens=1, occurrence=use).split(", ")
        assert tags[0] == "1girl" and tags == [tag for tag in TAGS.split(", ") if tag in tags]
        kept.update(tags)
    assert kept["1girl"] == 3000 and all(2100 < kept[tag] < 2400 for tag in TAGS.split(", ")[1:])


def test_dropout_does_not_change_the_order_of_tags():
    for use in range(50):
        with_dropout = draw(shuffle=True, dropout_rate=0.5, occurrence=use)
        assert with_dropout in ("", draw(shuffle=True, occurrence=use))


def test_of_several_captions_one_is_drawn():
    counts = Counter(draw(["x", "y", "z"], occurrence=use) for use in range(3000))
    assert set(counts) == {"x", "y", "z"} and all(900 < count < 1100 for count in counts.values())


def test_an_empty_caption_stays_empty():
    assert draw([""], shuffle=True, tag_dropout_rate=0.5, keep_tokens=1) == ""


def test_the_use_decides_and_nothing_else():
    settings = {"shuffle": True, "dropout_rate": 0.2, "tag_dropout_rate": 0.3}
    uses = [draw(occurrence=use, **settings) for use in range(40)]
    assert uses == [draw(occurrence=use, **settings) for use in range(40)] and len(set(uses)) > 20
