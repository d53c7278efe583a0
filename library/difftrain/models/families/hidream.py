"""HiDream-I1 (HiDream.ai 2025, arXiv:2505.22705): experts in every block, each of which reads a layer of a language model of its own.

Images that are not square are filled up to the tokens of the largest one, as the release was trained: what fills up has
keys of zeros, and is not masked. The network predicts the opposite of the velocity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.models import passes
from difftrain.models.facts import Agree, Bound, Lora, Shift, Sizes, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.weights.source import WeightSource

_HEAD = 128  # channels of a head in every release
_LAST = 31  # layer of the language model that is read by all blocks beyond as many


def _depth(sizes: Sizes) -> str:
    """Say what is wrong with the layers that blocks read."""
    picked, own = sizes["transformer"]["llama_layers"] or (), sizes["transformer"]
    blocks, layers = own["num_layers"] + own["num_single_layers"], sizes["text_encoder_4"]["num_hidden_layers"]
    if len(picked) != blocks:
        return f"names {len(picked)} layers for {blocks} blocks"
    return f"names layer {max(picked)}" if any(not 0 <= layer < layers for layer in picked) else ""


class HiDream(ModelFamily):
    """The facts of a HiDream-I1 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "hidream"
    modelspec = "hidream-i1"
    texts: tuple[Text, ...] = (
        Text("text_encoder", "tokenizer", "clip", 128, hidden=None, pooled="text_embeds"),
        Text("text_encoder_2", "tokenizer_2", "clip", 128, hidden=None, pooled="text_embeds", pads_zero=True),
        Text("text_encoder_3", "tokenizer_3", "t5", 128, masked=True, zeros=False),
        Text("text_encoder_4", "tokenizer_4", "llm", 128, masked=True, zeros=False, pads_end=True),
    )
    blocks = ("double_stream_blocks", "single_stream_blocks")
    shift = Shift(3.0, walks=False)
    zero = r"adaLN_modulation\.1\.|^final_layer\.linear\."
    leaving = r"final_layer\b"
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    needed = MappingProxyType({"transformer": ("patch_size", "caption_channels", "llama_layers")})
    lora = Lora((  # not the routed experts, whose weights go into one product (device/experts.py)
        "to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t",
        *(f"{owner}.w{number}" for owner in ("shared_experts", "ff_t") for number in (1, 2, 3)),
    ))  # fmt: skip
    agree: tuple[Agree | Bound, ...] = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Agree("transformer.caption_channels", lambda s: [s["text_encoder_3"]["d_model"], s["text_encoder_4"]["hidden_size"]],
              "text_encoder_3's d_model and text_encoder_4's hidden_size"),
        Agree("transformer.text_emb_dim",
              lambda s: sum(s[part]["projection_dim"] for part in ("text_encoder", "text_encoder_2")),
              "projection_dim of text_encoder and text_encoder_2 together"),
        Agree("transformer.attention_head_dim", lambda s: sum(s["transformer"]["axes_dims_rope"]), "axes_dims_rope in all"),
        Bound("transformer.llama_layers", _depth, "a layer of text_encoder_4, from 0 on, for each block"),
    )  # fmt: skip

    @cached_property
    def source(self) -> WeightSource:
        """Find the weights, whose sizes say which states of the language model are read: those of a few layers, each once."""
        source = super().source
        picked = source.complete(self.denoiser)["llama_layers"] or ()
        self.texts = (*self.texts[:-1], replace(self.texts[-1], layers=tuple(sorted({n + 1 for n in picked}))))
        return source

    def conditions(self, made: dict[str, Tensor], batch: Any = None) -> dict[str, Tensor]:
        """Return tokens (B, L, J) of T5, states (B, M, K D) of K layers, and pooled (B, P), padding as it is read."""
        pooled = torch.cat((made["pooled_1"], made["pooled_2"]), dim=-1)
        return {"tokens": made["hidden_3"], "states": made["hidden_4"], "pooled": pooled}

    # ------------------------------------------------------------------ how many tokens there are

    def image_tokens(self, rows: int, columns: int) -> int:
        """Count the tokens of an image, with what fills it up: a square one is as it is."""
        sizes = self.source.complete(self.denoiser)
        height, width = sizes["max_resolution"]
        own = rows * columns
        return own if rows == columns else max(own, height * width // self.patch**2)

    @property
    def small_sizes(self) -> tuple[tuple[int, int], ...]:
        """Squares: others are filled up to one number of tokens."""
        return (2, 2), (3, 3), (4, 4)

    # ------------------------------------------------------------------ the pass

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L + M, D).

        What the blocks read of the language model, M rows for each, goes before the time in `temb`, (B, blocks M + 1, D).
        """
        patches = x_t.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, N, p p C)
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        beyond = self.image_tokens(*size) - patches.shape[1]
        image = net.x_embedder(torch.nn.functional.pad(patches, (0, 0, 0, beyond)))

        layers = self.texts[-1].layers
        states = conditions["states"].unflatten(-1, (len(layers), -1))
        read = [
            project(states[:, :, layers.index(layer + 1)])
            for project, layer in zip(net.caption_projection, net.config.llama_layers)
        ]
        text = torch.cat((net.caption_projection[-1](conditions["tokens"]), read[-1]), dim=1)
        temb = net.t_embedder(t, x_t.dtype) + net.p_embedder(conditions["pooled"])
        rest = torch.cat((*read, temb.unsqueeze(1)), dim=1)
        rows = states.shape[1]
        return Tokens(image, text, rest, size, rope=self.places(net, image, size, text.shape[1] + rows, rows))

    def places(self, net: Any, image: Tensor, size: tuple[int, int], length: int, rows: int) -> tuple[Any, ...]:
        """Return rotary tables of image and text, made on the host once a size, and what its and all keys are multiplied by.

        length: of the text in a block. rows: those of them that are of its layer of the language model.
        """

        def make() -> tuple[Any, ...]:
            own, filled = size[0] * size[1], image.shape[1]
            ids = torch.cat((passes.grid(*size), torch.zeros(filled - own + length, 3)))
            table = net.pe_embedder(ids[None]).to(image.device)
            keys = torch.ones(1, filled + length, device=image.device, dtype=image.dtype)
            keys[:, own:filled] = 0
            return (table, *((keys[:, :filled], keys) if filled > own else (None, None)), rows)

        return self.once(("places", size, length, rows, image.device, image.dtype), make)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block of either kind, with its layer of the language model behind the text."""
        table, image_keys, keys, rows = tokens.rope
        assert tokens.text is not None
        image, text, temb = tokens.image, torch.cat((tokens.text, tokens.temb[:, :rows]), dim=1), tokens.temb[:, -1]
        if hasattr(block.block, "ff_t"):
            image, text = block(image, _of_all(image_keys, temb), text, temb, table)
        else:
            both = block(torch.cat((image, text), dim=1), _of_all(keys, temb), None, temb, table)
            image, text = both.split((image.shape[1], text.shape[1]), dim=1)
        return replace(tokens, image=image, text=text[:, :-rows], temb=tokens.temb[:, rows:])

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        patches = net.final_layer(tokens.image, tokens.temb[:, -1])[:, : tokens.size[0] * tokens.size[1]]
        return -passes.unpack_channels_last(patches, self.patch, tokens.size)

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off its tensors, which are called alike in every layout. Raises KeyError."""
        width, entering = shapes["x_embedder.proj.weight"]
        double, single = (count(shapes, rf"{kind}_stream_blocks\.(\d+)\.") for kind in ("double", "single"))
        head, blocks = min(width, _HEAD), double + single
        return {
            "patch_size": 2,
            "in_channels": entering // 4,
            "out_channels": shapes["final_layer.linear.weight"][0] // 4,
            "num_layers": double,
            "num_single_layers": single,
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "caption_channels": [shapes[f"caption_projection.{n}.linear.weight"][1] for n in (blocks, 0)],
            "text_emb_dim": shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
            "num_routed_experts": shapes["double_stream_blocks.0.block.ff_i.gate.weight"][0],
            "axes_dims_rope": [head // 2, head // 4, head // 4],
            "llama_layers": [min(n, _LAST) for n in range(blocks)],
        }


def _of_all(keys: Tensor | None, temb: Tensor) -> Tensor | None:
    """Give each sample of a batch what keys are multiplied by."""
    return None if keys is None else keys.expand(len(temb), -1)
