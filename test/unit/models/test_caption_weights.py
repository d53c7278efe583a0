"""Weighted captions and clip skip: from text to conditions, against plain readings of both."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from sdxl import batch_of, config, loaded, pipeline_over, text_of

from difftrain.contracts import ConfigFault, Parts
from difftrain.models.description import unread_text as unread_of
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.text.clip_tokens import ClipTokenize, weigh, weighted_pieces
from difftrain.models.text.encode import join_chunks

CAPTIONS = ["a (large:1.5) red [star]", "two ((small)) green circles (on a white:0.3) background"]


@cache
def made(weighted: bool = False, **model: Any) -> tuple[SDXLFamily, Parts]:
    """Load once; parts are as they were loaded, save for gradients."""
    return loaded(config({"captions": {"weighted": weighted}}, **model))


@pytest.mark.flags("weighted_captions")
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("normal text", [("normal text", 1.0)]),
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        (r"\(literal\]", [("(literal]", 1.0)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0), ("house", 1.573), (" ", 1.1), ("on", 1.0), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1),
                ("sky", 1.4641), (".", 1.1),
            ],
        ),
        ("[a [b]] c", [("a ", 1 / 1.1), ("b", 1 / 1.21), (" c", 1.0)]),
        ("(a:-1.5) (b:+2)", [("a", -1.5), (" ", 1.0), ("b", 2.0)]),
        ("(a:0)", [("a", 0.0)]),
        ("time 10:30 a:1.2)", [("time 10:30 a:1.2)", 1.0)]),
        ("[a:1.2]", [("a:1.2", 1 / 1.1)]),
        (r"back\\slash lone\end", [(r"back\slash loneend", 1.0)]),
        ("(a:1.2.3) b", [("a:1.2.3) b", 1.1)]),
        (") ] a", [(") ] a", 1.0)]),
        ("", []),
    ],
)  # fmt: skip
def test_brackets_are_read_as_prompts_write_them(text: str, pieces: list[tuple[str, float]]) -> None:
    found = weighted_pieces(text)
    assert [piece for piece, _ in found] == [piece for piece, _ in pieces]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in pieces])


def test_weighing_keeps_the_mean_of_each_text() -> None:
    states = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)) + 0.5
    weights = torch.tensor([[1.0] * 7, [1, 2, 1, 1, 0.5, 1, 1], [1, 0, 1, 1, 1, 1, 1]])
    found = weigh(states, weights)
    assert torch.equal(found[0], states[0])
    for text in (1, 2):
        plain = states[text] * weights[text][:, None]
        assert torch.allclose(found[text], plain * (states[text].mean() / plain.mean()), atol=1e-6)
        assert found[text].mean().item() == pytest.approx(states[text].mean().item(), abs=1e-6)
    assert weigh(states.bfloat16(), weights).dtype == torch.bfloat16
    assert weigh(states, torch.zeros(3, 7)).equal(torch.zeros_like(states))


@pytest.mark.flags("weighted_captions")
@pytest.mark.parametrize("length", [77, 150])
def test_tokens_carry_the_weights_of_their_pieces(length: int) -> None:
    family, parts = made(weighted=True, max_token_length=length)
    tokenize = family.tokenizer(parts)
    without = ClipTokenize(family.vocabularies, length)
    long = "(" + "star " * 90 + ":1.5) end"
    found = tokenize([*CAPTIONS, long, "", "(a:1.2)"])
    chunks = tokenize.num_chunks
    for i in (1, 2):
        ids, weights = found[f"input_ids_{i}"], found[f"token_weights_{i}"]
        assert ids.shape == weights.shape == (5, chunks, 77) and weights.dtype == torch.float32
        assert (weights[..., 0] == 1).all() and (weights[..., -1] == 1).all() and (weights[3] == 1).all()
        body = weights[2, :, 1:-1].flatten()
        of_long = len(family.vocabularies[i - 1].backend().encode("star " * 90, add_special_tokens=False).ids)
        assert (body[:of_long] == 1.5).all() and (body[of_long:] == 1).all()
        assert ids[4].equal(without(["a"])[f"input_ids_{i}"][0])
        assert weights[4, 0, :3].tolist() == pytest.approx([1, 1.2, 1])
        pieces = [family.vocabularies[i - 1].backend().encode(p, add_special_tokens=False).ids for p, _ in
                  weighted_pieces(CAPTIONS[0])]  # fmt: skip
        flat = [each for piece in pieces for each in piece]
        assert ids[0, 0, 1 : len(flat) + 1].tolist() == flat
        expected = [w for piece, (_, w) in zip(pieces, weighted_pieces(CAPTIONS[0])) for _ in piece]
        assert weights[0, 0, 1 : len(flat) + 1].tolist() == pytest.approx(expected)
    assert "token_weights_1" not in without(CAPTIONS)


@pytest.mark.flags("weighted_captions")
@pytest.mark.parametrize("length", [77, 150])
def test_weights_multiply_the_states_of_both_encoders(length: int) -> None:
    """Frozen and trained encoders alike; what is pooled stays."""
    frozen, parts = made(weighted=True, max_token_length=length)
    trained, root_parts = made(weighted=True, max_token_length=length, train_text_encoder=True)
    batch = batch_of(frozen, parts, [*CAPTIONS, "a star"])
    hidden, pooled = text_of(parts.root, frozen.text(batch, parts))
    again, again_pooled = text_of(root_parts.root, trained.text(batch, root_parts))
    assert torch.allclose(hidden, again, atol=1e-6) and torch.allclose(pooled, again_pooled, atol=1e-6)

    unweighted = {k: v for k, v in batch.features.items() if not k.startswith("token_weights")}
    weights = [join_chunks(batch.features[f"token_weights_{i}"].flatten(0, 1)[..., None], length // 75) for i in (1, 2)]
    batch.features = unweighted
    plain, plain_pooled = text_of(parts.root, frozen.text(batch, parts))
    assert torch.equal(pooled, plain_pooled) and torch.equal(hidden[2], plain[2])
    width = parts.frozen["text_encoder_1"].config.hidden_size
    expected = []
    for states, each in zip((plain[..., :width], plain[..., width:]), weights):
        weighed = states * each
        expected.append(weighed * (states.mean((1, 2)) / weighed.mean((1, 2)))[:, None, None])
    assert torch.allclose(hidden, torch.cat(expected, -1), atol=1e-5)
    assert not torch.allclose(hidden[0], plain[0], atol=1e-3)


@pytest.mark.flags("weighted_captions", "clip_skip")
def test_prompts_are_drawn_as_captions_are_trained() -> None:
    family, parts = made(weighted=True, clip_skip=1)
    hidden, pooled = text_of(parts.root, family.text(batch_of(family, parts, CAPTIONS), parts))
    found = text_of(parts.root, family.drawer(parts).conditions(list(CAPTIONS), (64, 64)))
    assert torch.allclose(found[0], hidden, atol=1e-6) and torch.allclose(found[1], pooled, atol=1e-6)


@pytest.mark.flags("clip_skip")
@pytest.mark.parametrize("trains", [False, True])
def test_clip_skip_takes_other_layers_as_diffusers_does(trains: bool) -> None:
    plain, plain_parts = made()
    pipeline, batch = pipeline_over(plain, plain_parts), batch_of(plain, plain_parts, CAPTIONS)
    for skip in (None, 1, 2):
        family, parts = made(train_text_encoder=trains, clip_skip=skip) if skip != 2 else made(clip_skip=2)
        theirs = None if skip is None else skip - 2
        with torch.no_grad():
            hidden, pooled = text_of(parts.root, family.text(batch, parts))
            expected = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False, clip_skip=theirs)
            usual = text_of(plain_parts.root, plain.text(batch, plain_parts))[0]
        assert torch.allclose(hidden, expected[0], atol=1e-5) and torch.allclose(pooled, expected[2], atol=1e-5)
        assert torch.allclose(hidden, usual, atol=1e-3) == (skip != 1)
    notes = made(train_text_encoder=trains, clip_skip=1)[1].notes
    assert sum(note.startswith("clip_skip 1:") and "clip_skip=-1" in note for note in notes) == 1


@pytest.mark.flags("clip_skip")
def test_what_gets_no_gradient_follows_the_layer() -> None:
    for skip, unread in ((None, {1}), (1, set())):
        family, parts = made(train_text_encoder=True, clip_skip=skip)
        inputs = family.inputs(batch_of(family, parts, CAPTIONS), parts)
        family.loss_sums(family.forward(parts.root, inputs), inputs)["loss"].backward()
        without = {name for name, p in parts.root.text_encoder_1.named_parameters() if p.grad is None}
        assert without == set(unread_of(family.texts[0], parts.root.text_encoder_1))
        layers = {int(name.split("layers.")[1].split(".")[0]) for name in without if "layers." in name}
        assert layers == unread and any("final_layer_norm" in name for name in without)
        assert all(p.grad is not None for p in parts.root.text_encoder_2.parameters())
        assert sum(re.search(r"final_layer_norm .*not trained", note) is not None for note in parts.notes) == 1


@pytest.mark.flags("clip_skip")
def test_skipping_every_layer_is_a_fault_and_the_header_says_what_was_skipped() -> None:
    with pytest.raises(ConfigFault, match=r"--clip_skip: is 3, .* 2 layers"):
        loaded(config(clip_skip=3))
    header = made(weighted=True, clip_skip=1)[0].metadata("t", 0.0)
    assert header["modelspec.encoder_layer"] == "1"
    assert "modelspec.encoder_layer" not in made()[0].metadata("t", 0.0)
