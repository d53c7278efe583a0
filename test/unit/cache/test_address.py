"""Addresses: equal for what is equal, another for whatever differs, and the same on every machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from difftrain.cache.manifest.address import (
    MediaTransforms,
    as_array,
    media_address,
    media_state,
    text_address,
    text_addresses,
)
from difftrain.config.schema.sections import CaptionSection, DatasetSection
from difftrain.contracts import Bucket
from difftrain.data.index.inspection import content_of
from difftrain.data.plan.buckets import BucketTable, Fit
from difftrain.data.recipe import Recipe

CUT = [2, [1, 64, 96], [100, 64], [2, 0, 96, 64], False, None, "host"]
CONTENT = content_of(b"picture")


def test_addresses_do_not_change_from_version_to_version():
    assert CONTENT.hex() == "88ec10769dab268ece2ed6b9a99e2504"
    assert media_address(CONTENT, CUT, "vae", "fp32").hex() == "8d05b1b1a98dd2c4854bf1a0d7f6552c"
    tokens = {"ids": np.arange(6, dtype=np.int64).reshape(1, 6), "weights": np.ones(3, np.float32)}
    assert text_address(tokens, "te", "bf16").hex() == "0fe818af1dca7554d541216ece37cd87"


def test_whatever_decides_a_picture_changes_its_address():
    variants = [(CONTENT, CUT, "vae", "fp32"), (content_of(b"other"), CUT, "vae", "fp32"),
                (CONTENT, CUT, "vae2", "fp32"), (CONTENT, CUT, "vae", "bf16"), (CONTENT, CUT, "va", "efp32")]  # fmt: skip
    others = [3, [9, 64, 96], [100, 65], [0, 0, 96, 64], True, "lanczos", "device"]
    for place, other in enumerate(others):
        variants.append((CONTENT, [*CUT[:place], other, *CUT[place + 1 :]], "vae", "fp32"))
    assert len({media_address(*each) for each in variants}) == len(variants)
    state = media_state(CUT, "vae", "fp32")
    state.update(CONTENT)
    assert state.digest() == media_address(*variants[0])


def test_a_clip_is_not_its_first_picture(monkeypatch):
    recipe, made = Recipe(CaptionSection(), BucketTable.of(DatasetSection(resolution=(64, 64))), 1), []
    select = BucketTable.select
    for frames in (1, 9):

        def clip(self, size_wh, frames=frames) -> Fit:
            found = select(self, size_wh)
            return Fit(**{**vars(found), "bucket": Bucket(found.bucket.height, found.bucket.width, frames)})

        monkeypatch.setattr(BucketTable, "select", clip)
        made.append(MediaTransforms([recipe], "vae", "fp32").address(0, (64, 64), False, CONTENT))
    assert made[0] != made[1]


def tokens_of(count=4, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 99, (count, 2, 7)),
        "mask": rng.integers(0, 2, (count, 7)).astype(bool),
        "weights": rng.random((count, 7), np.float32),
    }


def test_captions_of_a_batch_have_the_addresses_of_each_alone():
    tokens = tokens_of()
    together = text_addresses(tokens, (), "te", "fp32")
    assert together == [text_address({n: each[i] for n, each in tokens.items()}, "te", "fp32") for i in range(4)]
    assert together == text_addresses({n: torch.from_numpy(each) for n, each in tokens.items()}, (), "te", "fp32")
    assert as_array(together).tobytes() == b"".join(together)
    assert text_addresses({n: each[:0] for n, each in tokens.items()}, (), "te", "fp32") == []


def test_every_bit_of_the_inputs_counts_and_nothing_else_does():
    tokens = tokens_of(1)
    variants = [tokens]
    for name, flip in (("ids", lambda each: each + (np.arange(14).reshape(2, 7) == 13)), ("mask", np.logical_not),
                       ("weights", lambda each: each + np.float32(1e-6)), ("ids", lambda each: each.astype(np.int32)),
                       ("ids", lambda each: each.reshape(1, 14))):  # fmt: skip
        variants.append(tokens | {name: flip(tokens[name])})
    found = [text_addresses(each, (), "te", "fp32")[0] for each in variants]
    found += [text_addresses(tokens, (), *words)[0] for words in (("te2", "fp32"), ("te", "fp16"))]
    found += [text_addresses(tokens, some, "te", "fp32")[0] for some in (("ids",), ("ids", "mask"))]
    assert len(set(found)) == len(found)
    inputs = ("ids", "mask", "not there")  # what a tokenizer leaves out is none
    pair = [text_addresses(tokens | {"weights": each}, inputs, "te", "fp32") for each in (np.zeros(1), tokens["ids"])]
    assert pair[0] == pair[1] == text_addresses(tokens, ("mask", "ids"), "te", "fp32")


@pytest.mark.parametrize("words", itertools.permutations(["a", "b"]))
def test_words_are_not_run_together(words):
    assert media_address(CONTENT, ["ab"], *words) != media_address(CONTENT, ["a", "b"], *words)
