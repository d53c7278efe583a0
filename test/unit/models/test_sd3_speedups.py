"""Token routing, patch masking and alignment: the pass with some tokens, what counts of the loss, what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from sd3_speedups import config, vision_folder
from torch import Tensor

from difftrain.cache.build import on_device
from difftrain.cache.request import cache_requests
from difftrain.config.schema.sections import (
    CacheSection,
    RepaSection,
)
from difftrain.contracts import EVERY
from difftrain.device import choose
from difftrain.models import passes, repa, routing
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.passes import PassOutputs, PassPlan
from difftrain.models.root import DenoiserRoot
from difftrain.models.routing import BlockSpan, Kept

SIZES: dict[str, Any] = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 12,
    "pos_embed_max_size": 12,
}  # fmt: skip
HEIGHT, WIDTH = 6, 10  # of latents: 3 x 5 tokens


FAMILY = SD3Family(config())
WHOLE = PassPlan()


def run(model: Any, x: Tensor, time: Tensor, words: Tensor, pooled: Tensor, plan: PassPlan = WHOLE) -> PassOutputs:
    return passes.run(FAMILY, model, x, time, {"tokens": words, "pooled": pooled}, plan)


def made() -> Any:
    torch.manual_seed(0)
    model = SD3Transformer2DModel(**SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def given() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(2, 4, HEIGHT, WIDTH, dtype=torch.float64)
    words, pooled = torch.randn(2, 7, 24, dtype=torch.float64), torch.randn(2, 12, dtype=torch.float64)
    return x, torch.tensor([100.0, 700.0], dtype=torch.float64), words, pooled


PLACES = torch.tensor([[0, 4, 7, 14], [1, 2, 9, 10]])


def test_patches_are_those_that_tokens_are_made_of() -> None:
    image = torch.arange(2 * 3 * HEIGHT * WIDTH).view(2, 3, HEIGHT, WIDTH)
    found = routing.patches_at(image, PLACES, 2)
    assert found.shape == (2, 3, 8, 2)
    for sample in range(2):
        for row, place in enumerate(PLACES[sample].tolist()):
            y, x = place // 5, place % 5
            assert torch.equal(
                found[sample, :, 2 * row : 2 * row + 2], image[sample, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
            )


def test_tokens_come_back_to_where_they_were() -> None:
    tokens = torch.randn(2, 15, 6)
    some = routing.chosen(tokens, PLACES)
    assert torch.equal(some[1, 2], tokens[1, 9])
    back = routing.returned(tokens, PLACES, some + 1)
    assert torch.equal(routing.chosen(back, PLACES), some + 1)
    others = [place for place in range(15) if place not in PLACES[0].tolist()]
    assert torch.equal(back[0, others], tokens[0, others])


@pytest.mark.parametrize("span", [BlockSpan(2, 3), BlockSpan(1, 4), BlockSpan(4, 4), BlockSpan(3)])
def test_keeping_all_tokens_changes_nothing(span: BlockSpan) -> None:
    model, x = made(), given()
    all_places = torch.arange(15).expand(2, -1)
    plain, kept = run(model, *x), run(model, *x, plan=PassPlan(kept=Kept(all_places, span)))
    expected = plain.velocity if span.last else routing.patches_at(plain.velocity, all_places, 2)
    torch.testing.assert_close(kept.velocity, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("span", [BlockSpan(2, 3), BlockSpan(2, 4), BlockSpan(3)])
@torch.no_grad()
def test_spared_tokens_pass_by_and_the_others_see_themselves_alone(span: BlockSpan) -> None:
    """By hand: the blocks of the span on the chosen tokens, one after another."""
    model, (x, time, words, pooled) = made(), given()
    found = run(model, x, time, words, pooled, plan=PassPlan(taps=(1, 2, 3, 4), kept=Kept(PLACES, span)))
    picture, temb, text = model.pos_embed(x), model.time_text_embed(time, pooled), model.context_embedder(words)
    for number, block in enumerate(model.transformer_blocks, 1):
        inside = span.first <= number and (span.last is None or number <= span.last)
        if number == span.first:
            before = picture.clone()
            picture = torch.stack([each[rows] for each, rows in zip(picture, PLACES)])
        text, picture = block(hidden_states=picture, encoder_hidden_states=text, temb=temb)
        if number == span.last:
            for each, rows, some in zip(before, PLACES, picture):
                each[rows] = some
            picture = before
        assert found.image_after[number].shape[1] == (4 if span.spares(number) else 15), inside
        torch.testing.assert_close(found.image_after[number], picture, rtol=0, atol=1e-12)
    patches = model.proj_out(model.norm_out(picture, temb))
    if span.last is None:
        expected = patches.unflatten(2, (2, 2, 4)).permute(0, 4, 1, 2, 3).flatten(2, 3)
    else:
        expected = patches.view(2, 3, 5, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(2, 4, HEIGHT, WIDTH)
    torch.testing.assert_close(found.velocity, expected, rtol=0, atol=1e-12)


def test_checkpointing_changes_no_gradient() -> None:
    grads = []
    for checkpointing in (False, True):
        model = made()
        if checkpointing:
            model.enable_gradient_checkpointing()
        run(model, *given(), plan=PassPlan(kept=Kept(PLACES, BlockSpan(2, 3)))).velocity.square().sum().backward()
        grads.append([each.grad for each in model.parameters() if each.grad is not None])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_root_keeps_tokens_only_where_its_conditions_say_so() -> None:
    x, time, words, pooled = given()
    root = DenoiserRoot(FAMILY, "transformer", made(), span=BlockSpan(2, 3))
    conditions = {"tokens": words, "pooled": pooled}
    (plain,) = root(x, time, conditions)
    torch.testing.assert_close(plain, run(root.transformer, x, time, words, pooled).velocity, rtol=0, atol=0)
    (routed,) = root(x, time, {**conditions, routing.KEEP: PLACES})
    assert not torch.allclose(routed, plain)


def test_the_projector_makes_tokens_of_one_block_and_is_reached_by_every_gradient() -> None:
    x, time, words, pooled = given()
    module = repa.projector(16, 20, 5)
    torch.nn.Module.to_empty(module, device="cpu")
    for name, value in repa.weights(module, 3):
        module.get_parameter(name).data.copy_(value)
    root = DenoiserRoot(FAMILY, "transformer", made(), projector=module.double(), align_layer=2, span=BlockSpan(2, 3))
    conditions = {"tokens": words, "pooled": pooled}
    *_, projected = root(x, time, conditions, align=True)
    after = run(root.transformer, x, time, words, pooled, plan=PassPlan(taps=(2,))).image_after[2]
    torch.testing.assert_close(projected, module(after), rtol=0, atol=1e-12)
    *_, some = root(x, time, {**conditions, routing.KEEP: PLACES}, align=True)
    assert some.shape == (2, 4, 5)
    velocity, anchor = root(x, time, conditions)
    assert anchor.shape == () and float(anchor.detach()) == 0.0
    (velocity.sum() + anchor).backward()
    assert all(each.grad is not None and not each.grad.any() for each in module.parameters())


def test_the_distance_is_one_minus_the_cosine() -> None:
    a, b = torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    expected = [1 - sum(float(x @ y / (x.norm() * y.norm())) for x, y in zip(p, q)) / 6 for p, q in zip(a, b)]
    assert repa.distances(a, b).tolist() == pytest.approx(expected, abs=1e-6)
    assert repa.distances(a, 3 * a).abs().max() < 1e-6


def test_the_encoders_tokens_lie_as_the_models_do() -> None:
    features = torch.arange(2 * 5 * 3 * 5.0).view(2, 5, 3, 5)
    whole = repa.target_tokens(features, PLACES, 1, BlockSpan(2, 3))
    assert whole.shape == (2, 15, 5) and torch.equal(whole[1, 7], features[1, :, 1, 2])
    assert torch.equal(repa.target_tokens(features, PLACES, 2, BlockSpan(2, 3)), routing.chosen(whole, PLACES))
    assert torch.equal(repa.target_tokens(features, PLACES, 3, BlockSpan(2, 3)), whole)  # they are back
    assert torch.equal(repa.target_tokens(features, None, 2, BlockSpan(2, 3)), whole)


def test_the_image_encoder_is_for_training_alone(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vision", "dinov2")
    cfg = config(repa=RepaSection(encoder=str(folder), layer=2), cache=CacheSection(latents=True, text=True))
    family = SD3Family(cfg)
    parts = family.load(meta=True)
    told = [{wish.name for wish in cache_requests(cfg, family, parts, trains=trains)} for trains in (True, False)]
    assert told[0] - told[1] == {"vision"} and "latents" in told[1]
    wish = next(wish for wish in cache_requests(cfg, family, parts) if wish.name == "vision")
    assert wish.dtypes == {"vision": "bfloat16"}
    parts = family.load(deferred=EVERY)
    parts.offloaded |= parts.frozen.keys()
    with on_device(parts, choose("cpu")):
        assert [name for name in parts.frozen if not parts.is_loaded(name)] == ["vision"]
