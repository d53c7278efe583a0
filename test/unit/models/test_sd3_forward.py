"""The straight pass over SD3's blocks: diffusers' own velocity, loss and gradients, and the text beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor

from difftrain.config import TrainConfig
from difftrain.contracts import Inputs
from difftrain.device import use_attention
from difftrain.device.choice import choose
from difftrain.models import passes
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.passes import PassOutputs, PassPlan
from difftrain.models.root import DenoiserRoot

SIZES: dict[str, Any] = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 12,
    "pos_embed_max_size": 12,
}  # fmt: skip
GAMMA = 0.25
FAMILY = SD3Family(TrainConfig())
WHOLE = PassPlan()


def run(model: Any, given: Inputs, plan: PassPlan = WHOLE) -> PassOutputs:
    return passes.run(FAMILY, model, given.x_t, given.timestep, given.conditions, plan)


def made(*, text_branch: bool, **sizes: Any) -> Any:
    """Return a model in fp64 with weights that say something, its last block with a text branch or without."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(**SIZES | sizes)
    if text_branch:
        model.transformer_blocks[-1] = JointTransformerBlock(16, 2, 8, context_pre_only=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def inputs(height: int = 6, width: int = 10) -> Inputs:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    x0, noise = normal(3, 4, height, width), normal(3, 4, height, width)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    at = t.view(-1, 1, 1, 1)
    words = {"tokens": normal(3, 7, 24), "pooled": normal(3, 12)}
    mask = (normal(3, 1, height, width) > 0).double()
    return Inputs((1 - at) * x0 + at * noise, 1000 * t, words, noise - x0, torch.tensor([1.0, 0.5, 2.0]), mask)


def by_diffusers(model: Any, given: Inputs, layer: int | None) -> Tensor:
    """Compute the loss in the plainest way, with hooks where diffusers hands nothing out."""
    seen: dict[int, Tensor] = {}
    hooks = [model.context_embedder.register_forward_hook(lambda _, __, out: seen.update({0: out}))]
    for number, block in enumerate(model.transformer_blocks, 1):
        hooks.append(block.register_forward_hook(lambda _, __, out, number=number: seen.update({number: out[0]})))
    velocity = model(
        hidden_states=given.x_t,
        encoder_hidden_states=given.conditions["tokens"],
        pooled_projections=given.conditions["pooled"],
        timestep=given.timestep,
        return_dict=False,
    )[0]
    for hook in hooks:
        hook.remove()
    assert given.mask is not None
    square = (velocity - given.target) ** 2
    each = [(square[i].mean(0) * given.mask[i, 0]).sum() / given.mask[i].sum() for i in range(3)]
    if layer is not None:
        last = seen[len(model.transformer_blocks)]
        each = [one + GAMMA * ((last[i] - seen[layer][i].detach()) ** 2).mean() for i, one in enumerate(each)]
    return sum(w * one for w, one in zip(given.weight, each, strict=True))


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("how", ["plain", "checkpointed", "our attention"])
def test_velocity_loss_and_gradients_are_diffusers(
    layer: int | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", lambda self: self)  # fp64 all the way
    given, model = inputs(), made(text_branch=layer is not None)
    wanted = by_diffusers(model, given, layer)
    wanted.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    if how == "checkpointed":
        model.enable_gradient_checkpointing()
    if how == "our attention":
        use_attention(model, choose("cpu", 0, 1))
    family = SD3Family(TrainConfig.model_validate({"loss": {"text_recon_gamma": GAMMA}}))
    root = DenoiserRoot(family, "transformer", model, target_layer=layer)
    outputs = root(given.x_t, given.timestep, given.conditions)
    sums = family.loss_sums(outputs, given)
    total = sum(value for name, value in sums.items() if not name.startswith("metric/"))
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-10)
    total.backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.grad, gradients[name], rtol=1e-10, atol=1e-10, msg=name)
    assert len(outputs) == (1 if layer is None else 3)
    if layer is not None:
        assert not outputs[2].requires_grad and set(sums) == {
            "denoise", "text_recon", "metric/denoise_loss", "metric/text_recon_loss"
        }  # fmt: skip
        assert sums["text_recon"] == GAMMA * sums["metric/text_recon_loss"]
    else:
        assert set(sums) == {"loss", "metric/denoise_loss"} and sums["loss"] == sums["metric/denoise_loss"]


def test_other_sizes_and_designs_are_diffusers_too() -> None:
    """Two attentions in a block and norms of q and k, as SD3.5 has them; pictures of other shapes; two-channel patches."""
    for sizes in ({"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}, {"patch_size": 1, "out_channels": 8}):
        model = made(text_branch=False, **sizes)
        for height, width in ((4, 4), (8, 2)):
            given = inputs(height, width)
            words = given.conditions
            theirs = model(given.x_t, words["tokens"], words["pooled"], given.timestep, return_dict=False)[0]
            ours = run(model, given).velocity
            assert torch.equal(ours, theirs)


def test_what_lies_between_blocks_is_handed_out() -> None:
    model, given = made(text_branch=True), inputs()
    words = given.conditions
    plan = PassPlan(text=(0, 4), taps=(1, 3))
    out = run(model, given, plan)
    assert set(out.text_after) == {0, 4} and set(out.image_after) == {1, 3}
    assert out.text_after[4].shape == (3, 7, 16) and out.image_after[1].shape == (3, 15, 16)
    torch.testing.assert_close(out.text_after[0], model.context_embedder(words["tokens"]))
