"""Conditions made here are those that diffusers' pipeline makes of the same captions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from families import ORACLES, Tiny, batch_of, bucket_of, pipeline_of

LONG = "a red cat on a table in front of a window behind which it rains " * 40
CAPTIONS = ("", LONG, 'a sign that says "open, 24 hours"')


def test_own_conditions_are_the_pipelines(name: str, tiny: Tiny, folder: Path) -> None:
    prompts, shown = ORACLES[name].prompts, ORACLES[name].shown
    if prompts is None and shown is None:
        pytest.skip("the pipeline's tokenizer classes read a tiny vocabulary otherwise")
    batch, length = batch_of(tiny.family, bucket_of(name), CAPTIONS), max(tiny.family.lengths[-1:])
    with torch.no_grad():
        if shown is not None:
            theirs = shown(pipeline_of(folder, name), list(CAPTIONS), length, batch.features)
        elif prompts is not None:
            theirs = prompts(pipeline_of(folder, name), list(CAPTIONS), length)
    ours = tiny.family.text(batch, tiny.parts)
    if (sizes := ORACLES[name].sizes) is not None:
        theirs |= sizes(pipeline_of(folder, name), batch.features)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if value.dtype == torch.bool:
            assert torch.equal(ours[key], value), key
        else:
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)


def test_a_drawn_picture_is_told_its_own_size(name: str, tiny: Tiny, folder: Path) -> None:
    """As a pipeline does where it is told none: original and target are what is drawn, from the corner on."""
    sizes, (height, width, _) = ORACLES[name].sizes, bucket_of(name)
    if sizes is None:
        assert not tiny.family.size_features((height, width), 1), "say how the pipeline tells sizes"
        pytest.skip("it is told no sizes")
    ours = tiny.family.drawer(tiny.parts).conditions(list(CAPTIONS), (height, width))
    own = torch.tensor([[height, width]] * len(CAPTIONS))
    features = {"original_size": own, "crop_top_left": torch.zeros_like(own), "target_size": own}
    for key, value in sizes(pipeline_of(folder, name), features).items():
        assert torch.equal(ours[key], value), key


def test_the_tokenizer_is_picklable_and_knows_itself(tiny: Tiny) -> None:
    tokenize = tiny.family.tokenizer(tiny.parts)
    again = pickle.loads(pickle.dumps(tokenize))
    assert again.identity == tokenize.identity
    ours, theirs = tokenize(list(CAPTIONS)), again(list(CAPTIONS))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert tokenize.lengths(["", LONG])[0] == 0 and tokenize.lengths([LONG])[0] > tokenize.limit


def test_a_caption_of_halves_of_surrogates_is_read(tiny: Tiny) -> None:
    made = tiny.family.tokenizer(tiny.parts)(["a \ud83d cat"])
    assert all(len(value) == 1 for value in made.values())
