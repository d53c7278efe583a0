"""Cosmos 1.0 Diffusion, text to video (NVIDIA 2025, arXiv:2501.03575): the blocks of Cosmos-Predict2, with learned positions beside
rotary ones, in the preconditioned form of Karras et al. 2022 (models/objective/flow.py). Noise of deviation sigma is the
time sigma / (1 + sigma) of a flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from difftrain.config.schema.families import drawn_frames
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Fault, Inputs
from difftrain.diffusion.flow import SCALE
from difftrain.models.facts import Agree
from difftrain.models.families.cosmos_predict2 import LEVELS, CosmosPredict2
from difftrain.models.objective.flow import Preconditioning
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor, nn

SIGMA_DATA = 0.5  # deviation of the latents
# of the releases, by their heads: no tensor says it
_ROPE_SCALES = {32: [2.0, 1.0, 1.0], 40: [2.0, 2.0, 2.0]}
_AROUND = Preconditioning(SIGMA_DATA)


class Cosmos(CosmosPredict2):
    """What differs from Cosmos-Predict2: the preconditioning, positions, the VAE, and the names of the original layout."""

    name = "cosmos"
    modelspec = "cosmos-1-diffusion-text2world"
    latent_scale = SIGMA_DATA
    fps = 30.0  # of the releases
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels: video to video is not built"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.text_embed_dim", lambda s: s["text_encoder"]["d_model"], "text_encoder's d_model"),
        Agree("transformer.patch_size", lambda s: [1, 2, 2], "a token is 2x2 latent pixels of one frame"),
        Agree("transformer.extra_pos_embed_type", lambda s: "learnable", "without learned positions it is Cosmos-Predict2"),
    )  # fmt: skip

    def faults(self, net: nn.Module) -> list[Fault]:
        """Find what a configuration asks and this model has not: the VAE's statistics end with its longest clips."""
        problems, frames, longest = super().faults(net), drawn_frames(self.cfg), self.vae.longest
        if longest is not None and frames > longest:
            what = f"makes clips of {frames} frames, the VAE's statistics end at {longest}"
            problems.append(Fault(option("data.frame_buckets"), what, f"at most {longest}"))
        return problems

    def level(self, t: Tensor) -> Tensor:
        """Return what the network is told of a time in 0..1000."""
        return _AROUND.level(t / SCALE)

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, F, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, J), temb (B, 3 D)."""
        entering = _AROUND.entering(x_t, t / SCALE)
        tokens = super().enter(net, entering, t, conditions)
        positions = net.learnable_pos_embed(entering)
        return replace(tokens, more=tokens.more | {"positions": positions, "x_t": x_t, "t": t / SCALE})

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block; text stays as it entered."""
        more = tokens.more
        image = block(tokens.image, tokens.text, more["time"], tokens.temb, tokens.rope, more["positions"])
        return replace(tokens, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, F, H, W)."""
        return _AROUND.velocity(tokens.more["x_t"], tokens.more["t"], super().leave(net, tokens))

    def noised(self, batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
        """Noise latents, and weigh samples so that the loss is the paper's."""
        made = super().noised(batch, latents, conditions)
        return replace(made, weight=made.weight * _AROUND.weight(made.timestep / SCALE))

    def scheduler(self) -> Any:
        """Make the scheduler, which says the levels of noise that clips are drawn through."""
        from diffusers import EDMEulerScheduler

        return EDMEulerScheduler(**LEVELS, sigma_data=SIGMA_DATA)

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export: it draws clips unless it is told one frame."""
        return '"a red cat", num_frames=1, output_type="pil"'

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width, entering = shapes["x_embedder.proj.1.weight"]
        head = shapes["blocks.block0.blocks.0.block.attn.to_q.1.weight"][0]
        frames, *sides = (shapes[f"extra_pos_embedder.pos_emb_{axis}"][0] for axis in "thw")
        return {
            "in_channels": entering // 4 - 1,
            "out_channels": shapes["final_layer.linear.weight"][0] // 4,
            "num_attention_heads": width // head,
            "attention_head_dim": head,
            "num_layers": count(shapes, r"blocks\.block(\d+)\."),
            "mlp_ratio": shapes["blocks.block0.blocks.2.block.layer1.weight"][0] / width,
            "text_embed_dim": shapes["blocks.block0.blocks.1.block.attn.to_k.0.weight"][1],
            "adaln_lora_dim": shapes["blocks.block0.blocks.0.adaLN_modulation.1.weight"][0],
            "max_size": [frames, *(2 * side for side in sides)],
            "rope_scale": _ROPE_SCALES.get(width // head, _ROPE_SCALES[32]),
        }

    keys = """
patch_embed.proj = x_embedder.proj.1
learnable_pos_embed.pos_emb_t = extra_pos_embedder.pos_emb_t
learnable_pos_embed.pos_emb_h = extra_pos_embedder.pos_emb_h
learnable_pos_embed.pos_emb_w = extra_pos_embedder.pos_emb_w
time_embed.t_embedder.linear_1 = t_embedder.1.linear_1
time_embed.t_embedder.linear_2 = t_embedder.1.linear_2
time_embed.norm = affline_norm
norm_out.linear_1 = final_layer.adaLN_modulation.1
norm_out.linear_2 = final_layer.adaLN_modulation.2
proj_out = final_layer.linear
{ours}.norm1.linear_1 = {theirs}.0.adaLN_modulation.1
{ours}.norm1.linear_2 = {theirs}.0.adaLN_modulation.2
{ours}.norm2.linear_1 = {theirs}.1.adaLN_modulation.1
{ours}.norm2.linear_2 = {theirs}.1.adaLN_modulation.2
{ours}.norm3.linear_1 = {theirs}.2.adaLN_modulation.1
{ours}.norm3.linear_2 = {theirs}.2.adaLN_modulation.2
{ours}.attn1.to_q = {theirs}.0.block.attn.to_q.0
{ours}.attn1.to_k = {theirs}.0.block.attn.to_k.0
{ours}.attn1.to_v = {theirs}.0.block.attn.to_v.0
{ours}.attn1.norm_q = {theirs}.0.block.attn.to_q.1
{ours}.attn1.norm_k = {theirs}.0.block.attn.to_k.1
{ours}.attn1.to_out.0 = {theirs}.0.block.attn.to_out.0
{ours}.attn2.to_q = {theirs}.1.block.attn.to_q.0
{ours}.attn2.to_k = {theirs}.1.block.attn.to_k.0
{ours}.attn2.to_v = {theirs}.1.block.attn.to_v.0
{ours}.attn2.norm_q = {theirs}.1.block.attn.to_q.1
{ours}.attn2.norm_k = {theirs}.1.block.attn.to_k.1
{ours}.attn2.to_out.0 = {theirs}.1.block.attn.to_out.0
{ours}.ff.net.0.proj = {theirs}.2.block.layer1
{ours}.ff.net.2 = {theirs}.2.block.layer2
""".format(ours="transformer_blocks.{}", theirs="blocks.block{}.blocks")
