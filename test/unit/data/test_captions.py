"""Captions: kohya's meaning, and draws that only the record's use decides."""

import math
import random
import re
import time
from collections import Counter

import pytest

from difftrain.config import CaptionSection
from difftrain.contracts import MediaRef, Record
from difftrain.data.captions import caption_of, is_dropped, num_tags, variant_of, varies, written
from difftrain.diffusion.draws import Stream

TAGS = "1girl, solo, red hair, sky, cat, tree"


def draw(captions=(TAGS,), epoch=0, occurrence=0, step=0, total_steps=0, **settings):
    record = Record(0, b"k" * 16, MediaRef(0, "a.png"), tuple(captions), (64, 64))
    stream = Stream(1, record.key, occurrence, "caption")
    return caption_of(record, stream, CaptionSection(**settings), epoch, step, total_steps)


def drawn(captions, uses=2000, **settings):
    """Count what is drawn over many uses."""
    return Counter(draw(captions, occurrence=use, **settings) for use in range(uses))


def test_untouched_without_options():
    assert draw(["  as, it   is ,"]) == "  as, it   is ,"


@pytest.mark.flags("shuffle_caption", "keep_tokens")
def test_shuffling_keeps_all_tags_and_the_first_ones_in_front():
    seen = {draw(shuffle=True, keep_tokens=2, occurrence=use) for use in range(200)}
    assert len(seen) == 24  # every order of the four loose tags
    for caption in seen:
        tags = caption.split(", ")
        assert tags[:2] == ["1girl", "solo"] and sorted(tags) == sorted(TAGS.split(", "))


def test_all_orders_are_equally_likely():
    counts = Counter(draw(["a, b, c"], shuffle=True, occurrence=use) for use in range(6000))
    assert len(counts) == 6 and all(850 < count < 1150 for count in counts.values())


@pytest.mark.flags("caption_separator")
def test_another_separator_splits_but_commas_join_as_in_kohya():
    assert sorted(draw(["a; b ;c"], shuffle=True, separator=";").split(", ")) == ["a", "b", "c"]


def test_keeping_more_tags_than_there_are():
    assert draw(shuffle=True, keep_tokens=50, tag_dropout_rate=1.0) == TAGS


@pytest.mark.flags("caption_dropout_rate")
def test_dropout_rate():
    empty = sum(draw(dropout_rate=0.1, occurrence=use) == "" for use in range(5000))
    assert 420 < empty < 580
    assert draw(dropout_rate=1.0) == "" and draw(dropout_rate=0.0) == TAGS


@pytest.mark.flags("caption_dropout_every_n_epochs")
def test_dropout_every_n_epochs_counts_from_one():
    assert [draw(dropout_every_n_epochs=3, epoch=epoch) == "" for epoch in range(7)] == [False, False, True] * 2 + [
        False
    ]
    assert all(draw(dropout_every_n_epochs=1, epoch=epoch) == "" for epoch in range(3))


@pytest.mark.flags("caption_tag_dropout_rate")
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


@pytest.mark.flags("caption_prefix", "caption_suffix")
def test_prefix_and_suffix_stand_around_the_caption_with_a_space():
    assert draw(["a cat"], prefix="photo of", suffix="in 4k") == "photo of a cat in 4k"
    assert draw([""], prefix="photo of") == "photo of "
    assert draw(["a cat"], prefix="photo of", dropout_rate=1.0) == ""  # which drops them, too
    tags = draw(prefix="best,", shuffle=True, keep_tokens=1).split(", ")
    assert tags[0] == "best" and sorted(tags[1:]) == sorted(TAGS.split(", "))


@pytest.mark.flags("keep_tokens_separator")
def test_a_mark_keeps_what_is_before_it_and_behind_the_second():
    caption = "1girl, solo ||| red hair,, sky , cat ||| best, 4k"
    seen = drawn([caption], uses=300, shuffle=True, keep_tokens=1, keep_tokens_separator="|||")
    assert set(seen) == {
        f"1girl, solo, {a}, {b}, {c}, best, 4k"
        for a, b, c in [
            ("red hair", "sky", "cat"), ("red hair", "cat", "sky"), ("sky", "red hair", "cat"),
            ("sky", "cat", "red hair"), ("cat", "red hair", "sky"), ("cat", "sky", "red hair"),
        ]
    }  # fmt: skip
    assert set(drawn(["a ||| b, c"], shuffle=True, keep_tokens_separator="|||")) == {"a, b, c", "a, c, b"}
    dropped = draw([caption], tag_dropout_rate=1.0, keep_tokens_separator="|||")
    assert dropped == "1girl, solo, best, 4k"
    assert draw([caption], shuffle=True, keep_tokens=1).count("|||") == 2  # without the option it is text


@pytest.mark.flags("keep_tokens_separator")
@pytest.mark.flags("keep_tokens_separator", "caption_separator")
def test_a_separator_with_a_space_is_whole_in_front_of_the_mark():
    said = draw(["a; b; ||| c; d; ||| e; "], separator="; ", keep_tokens_separator="|||", token_warmup_step=5, step=9)
    assert said == "a, b, c, d, e"


def test_a_caption_without_the_mark_keeps_its_first_tags_and_the_mark_never_stays():
    assert draw(shuffle=True, keep_tokens=2, keep_tokens_separator="|||").startswith("1girl, solo, ")
    assert draw(["a ||| b,c"], keep_tokens_separator="|||") == "a, b, c"
    assert draw(["a, b ,c"], keep_tokens_separator="|||") == "a, b ,c"


@pytest.mark.flags("secondary_separator")
def test_what_the_second_separator_joins_moves_as_one():
    seen = drawn(["a;;;b, c"], shuffle=True, secondary_separator=";;;")
    assert set(seen) == {"a,b, c", "c, a,b"}
    assert draw(["a;;;b, c"], secondary_separator=";;;", separator=" |") == "a |b, c"


def both_steps(text, choose):
    """Read wildcards in two steps, as kohya describes them: first the escapes become other signs, then braces."""
    left, right = "\x02", "\x03"
    text = text.replace("{{", left).replace("}}", right)
    text = re.sub(r"\{([^}]+)\}", lambda found: choose(found.group(1).split("|")), text)
    return text.replace(left, "{").replace(right, "}")


@pytest.mark.flags("enable_wildcard")
@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a {red|blue} star", {"a red star", "a blue star"}),
        ("{a|b}{c|d}", {"ac", "ad", "bc", "bd"}),
        ("{a||b}", {"a", "", "b"}),
        ("{alone} {}", {"alone {}"}),
        ("{{a|b}}", {"{a|b}"}),
        ("{{{a|b}}}", {"{a", "{b}"}),
        ("{a|{b|c}", {"a", "{b", "c"}),
        ("{a|{b|c}}", {"{a|{b|c}"}),
        ("{a|b} } {", {"a } {", "b } {"}),
    ],
)
def test_wildcards_draw_one_of_their_words(caption, expected):
    found = drawn([caption], uses=300, enable_wildcard=True)
    assert set(found) == expected
    assert draw([caption]) == caption


@pytest.mark.flags("enable_wildcard")
def test_wildcards_are_read_as_in_two_steps():
    """Against the plain description, on anything that can be made of braces; the last word is always chosen."""

    class Last:
        def integer(self, high):
            return high - 1

        def uniform(self):
            return 0.5

    rng = random.Random(0)
    section = CaptionSection(enable_wildcard=True)
    for _ in range(20_000):
        text = "".join(rng.choice("{{{}}}|ab") for _ in range(rng.randrange(1, 14)))
        record = Record(0, b"k" * 16, MediaRef(0, "a.png"), (text,), (64, 64))
        assert caption_of(record, Last(), section, 0) == both_steps(text, lambda words: words[-1]), text


def test_braces_that_are_never_closed_cost_no_time():
    started = time.perf_counter()
    for ending in ("", "}}"):
        assert draw(["{a" * 50_000 + ending], enable_wildcard=True)[:6] == "{a{a{a"
    assert time.perf_counter() - started < 5.0  # they took 20 s each


@pytest.mark.flags("enable_wildcard")
def test_words_and_lines_are_equally_likely():
    counts = drawn(["{a|b|c}"], uses=3000, enable_wildcard=True)
    assert all(900 < counts[word] < 1100 for word in "abc")
    counts = drawn(["one\ntwo {x|y}"], uses=3000, enable_wildcard=True)
    assert 1400 < counts["one"] < 1600 and set(counts) == {"one", "two x", "two y"}
    assert draw(["one\ntwo"]) == "one"


@pytest.mark.flags("enable_wildcard", "caption_prefix", "caption_suffix")
def test_of_several_lines_the_first_has_the_prefix_and_the_last_the_suffix():
    seen = drawn(["a\nb\nc"], uses=200, enable_wildcard=True, prefix="P", suffix="S")
    assert set(seen) == {"P a", "b", "c S"}


def test_wildcards_leave_captions_without_any_as_they_were():
    for use in range(50):
        settings = {"shuffle": True, "tag_dropout_rate": 0.2, "dropout_rate": 0.1, "occurrence": use}
        assert draw(enable_wildcard=True, **settings) == draw(**settings)


@pytest.mark.flags("token_warmup_min", "token_warmup_step")
def test_captions_grow_with_the_steps():
    def lengths(**settings):
        return [len(draw(step=step, total_steps=40, **settings).split(", ")) for step in range(12)]

    assert lengths(token_warmup_step=10) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert lengths(token_warmup_step=0.25) == lengths(token_warmup_step=10)
    assert lengths(token_warmup_step=4, token_warmup_min=3) == [3, 3, 4, 5] + [6] * 8
    assert lengths(token_warmup_step=10, keep_tokens=2) == [3, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6]
    assert lengths(token_warmup_step=10, token_warmup_min=9) == [6] * 12
    assert lengths() == [6] * 12
    first = draw(token_warmup_step=10, step=4, shuffle=True)
    assert set(first.split(", ")) == set(TAGS.split(", ")[:3])  # cut before they are shuffled


@pytest.mark.flags("token_warmup_min", "token_warmup_step")
def test_the_number_of_tags_is_kohyas_formula():
    for warmup in (1, 7, 10, 100, 333):
        for least in (0, 1, 2, 5):
            section = CaptionSection(token_warmup_step=warmup, token_warmup_min=least)
            for count in (1, 3, 8, 40):
                for step in range(0, warmup, max(1, warmup // 13)):
                    kohya = math.floor(step * ((count - least) / warmup)) + least
                    tags = list(range(count))
                    assert tags[: num_tags(count, section, step, 0)] == tags[:kohya]
                assert num_tags(count, section, warmup, 0) == count


def test_every_option_at_once_is_a_function_of_the_use_and_the_step():
    settings = {
        "shuffle": True, "keep_tokens_separator": "|||", "secondary_separator": ";;;", "enable_wildcard": True,
        "prefix": "P,", "suffix": ", S", "token_warmup_step": 0.5, "dropout_rate": 0.1, "tag_dropout_rate": 0.2,
    }  # fmt: skip
    captions = ["{a|b} ||| c;;;d, e, f, {g|h}", "one, two\nthree"]

    def some():
        return [draw(captions, occurrence=use, step=use, total_steps=60, **settings) for use in range(60)]

    assert some() == some() and len(set(some())) > 30


def record_of(*captions):
    return Record(0, b"k" * 16, MediaRef(0, "a.png"), captions, (64, 64))


def variant(number, *captions, seed=0, **settings):
    record = record_of(*captions)
    return variant_of(record, Stream(seed, record.key, number, "caption"), CaptionSection(**settings))


def test_a_variant_is_what_a_use_of_that_number_draws_but_never_dropped():
    varied = {"shuffle": True, "tag_dropout_rate": 0.3, "enable_wildcard": True}
    for number in range(50):
        record = record_of("a, b, {c|d}, e", "f, g\nh, i")
        stream = Stream(0, record.key, number, "caption")
        drawn_ = caption_of(record, stream, CaptionSection(**varied), 0)
        assert variant(number, *record.captions, dropout_rate=0.9, dropout_every_n_epochs=1, **varied) == drawn_


def test_a_use_is_dropped_whether_or_not_there_are_variants():
    section, record = CaptionSection(shuffle=True, dropout_rate=0.3, dropout_every_n_epochs=4), record_of("a, b", "c")
    for use in range(200):
        told = is_dropped(record, Stream(1, record.key, use, "caption"), section, use % 8)
        assert told == (caption_of(record, Stream(1, record.key, use, "caption"), section, use % 8) == "")


def test_which_captions_vary():
    assert not varies(CaptionSection(dropout_rate=0.5, dropout_every_n_epochs=2, prefix="a", keep_tokens=1))
    for setting in ({"shuffle": True}, {"enable_wildcard": True}, {"tag_dropout_rate": 0.1}):
        assert varies(CaptionSection(**setting))


def test_written_captions_keep_prefix_first_line_and_separators():
    record = record_of("one; two\nrest", "three")
    section = CaptionSection(prefix="p", suffix="s", secondary_separator=";", dropout_rate=1.0)
    assert written(record, Stream(0, record.key, 0, "caption"), section) == ["p one, two", "p three s"]


def test_diffusion_pipes_captions_are_joined_as_they_were_cut_behind_a_prefix_that_stays():
    settings = {"dialect": "diffusion_pipe", "separator": ", "}
    assert draw(["a cat"], prefix="photo of", **settings) == "photo ofa cat"
    assert draw([""], prefix="x", **settings) == "x" and draw(["a"], prefix="x", dropout_rate=1.0, **settings) == ""
    for use in range(20):
        found = draw(["a, b, c"], prefix="p, ", shuffle=True, occurrence=use, **settings)
        assert found.startswith("p, ") and sorted(found.removeprefix("p, ").split(", ")) == ["a", "b", "c"]
    assert draw(["a;b ;c"], dialect="diffusion_pipe", separator=";", shuffle=True).count(";") == 2
    assert "b " in draw(["a;b ;c"], dialect="diffusion_pipe", separator=";", shuffle=True).split(";")


def test_a_first_letter_is_large_or_small_and_the_rest_stays():
    found = Counter(draw(["éa B"], shuffle_capitalization=True, occurrence=use) for use in range(1000))
    assert set(found) == {"éa B", "Éa B"} and min(found.values()) > 430
    assert draw([""], shuffle_capitalization=True) == ""
