"""Z-Image (Alibaba 2025, arXiv:2511.22699): image and text refined apart, then in one stream of single blocks.

Image and text are filled up to multiples of 32 tokens with learnt ones that blocks see. Here captions have the length that
training reads, and a mask leaves out what diffusers, which reads lengths on the host, cuts off. The network takes 1 - t,
and predicts the opposite of the velocity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from difftrain.device.fused_layers import real_tables
from difftrain.models import passes
from difftrain.models.facts import Agree, Lora, Shift, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # Qwen3's chat, which may think
UNIT = 32  # tokens of which image and text are multiples
_EMBEDDER = "2-1"  # of patches of 2 x 2 and one frame
_REFINERS = 1000  # from here on layers are numbered that refine the image
_LISTS = ("noise_refiner", "context_refiner", "layers")
_ROWS = """
{list}.{}.attention.to_q + {list}.{}.attention.to_k + {list}.{}.attention.to_v = {list}.{}.attention.qkv
{list}.{}.attention.norm_q = {list}.{}.attention.q_norm
{list}.{}.attention.norm_k = {list}.{}.attention.k_norm
{list}.{}.attention.to_out.0 = {list}.{}.attention.out
{list}.{}.feed_forward.w1 = {list}.{}.feed_forward.w1
{list}.{}.feed_forward.w2 = {list}.{}.feed_forward.w2
{list}.{}.feed_forward.w3 = {list}.{}.feed_forward.w3
{list}.{}.attention_norm1 = {list}.{}.attention_norm1
{list}.{}.attention_norm2 = {list}.{}.attention_norm2
{list}.{}.ffn_norm1 = {list}.{}.ffn_norm1
{list}.{}.ffn_norm2 = {list}.{}.ffn_norm2
{list}.{}.adaLN_modulation.0 = {list}.{}.adaLN_modulation.0
"""


class _Positions(NamedTuple):
    """Cosines and sines that all images of a size share: of text (L, D), of rows and columns (N, D'), of the first axis."""

    text: tuple[Tensor, Tensor]
    places: tuple[Tensor, Tensor]
    first: tuple[Tensor, Tensor]


class ZImage(ModelFamily):
    """The facts of a Z-Image model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "z_image"
    modelspec = "z-image"
    texts = (
        Text("text_encoder", "tokenizer", "llm", 512, hidden=-2, template=TEMPLATE, masked=True, passes_mask=True),
    )  # fmt: skip
    blocks = _LISTS
    shift = Shift(3.0)
    fills_to = UNIT
    zero = r"adaLN_modulation\.\d\.|^all_final_layer\..*\.linear\."
    silent = r"^(x|cap)_pad_token$"  # where a size, or every caption, fills its tokens by itself
    leaving = r"all_final_layer\b"
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "adaLN_modulation.0"))
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.cap_feat_dim", lambda s: s["text_encoder"]["hidden_size"], "text_encoder's hidden_size"),
        Agree("transformer.all_patch_size", lambda s: [2], "a token is 2x2 latent pixels"),
        Agree("transformer.all_f_patch_size", lambda s: [1], "of one frame"),
        Agree("transformer.dim", lambda s: s["transformer"]["n_heads"] * sum(s["transformer"]["axes_dims"]),
              "n_heads times axes_dims in all"),
    )  # fmt: skip

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(min(self.source.complete(self.denoiser)["axes_lens"][1:])) * self.token

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D).

        N and L are multiples of 32; of a caption the tokens up to the next such multiple are seen.
        """
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        temb = net.t_embedder((1000.0 - t) / 1000.0 * net.t_scale).type_as(x_t)

        # --- image
        patches = passes.pack_channels_last(x_t, self.patch)
        image = net.all_x_embedder[_EMBEDDER](_filled(patches))
        beyond = torch.arange(image.shape[1], device=x_t.device) >= patches.shape[1]
        image = torch.where(beyond[:, None], net.x_pad_token, image)

        # --- text
        tokens, own = conditions["tokens"], conditions.get("mask")
        if own is None:
            own = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
        text, own = net.cap_embedder(_filled(tokens)), pad(own, (0, -own.shape[1] % UNIT))
        text = torch.where(own.unsqueeze(-1), text, net.cap_pad_token)
        length = (own.sum(dim=1) + UNIT - 1) // UNIT * UNIT
        seen = torch.arange(text.shape[1], device=x_t.device) < length.unsqueeze(1)

        # --- positions: an image begins behind its caption
        known = self.positions(net, size, text.shape[1], x_t.device)
        more: dict[str, Any] = {"seen": seen if "mask" in conditions else None}
        for name, of_text, places, first in zip(("cos", "sin"), known.text, known.places, known.first):
            start = first[length + 1].unsqueeze(1).expand(-1, len(places), -1)
            rows = torch.cat((start, places.expand(len(x_t), -1, -1)), dim=-1)
            at_zero = first.new_full((), float(name == "cos"))  # where those stand that fill up
            rows = torch.where(beyond[:, None], at_zero, rows)
            more[name] = torch.cat((rows, of_text.expand(len(x_t), -1, -1)), dim=1)
        return Tokens(image, text, temb, size, rope=known.text, more=more)

    def positions(self, net: Any, size: tuple[int, ...], length: int, device: torch.device) -> _Positions:
        """Return tables that hang on no caption: made on the host, so equal on every device, once a size."""

        def make() -> _Positions:
            embedder = net.rope_embedder
            axes = embedder.precompute_freqs_cis(embedder.axes_dims, embedder.axes_lens, embedder.theta)
            first, rows, columns = ([table.to(device) for table in real_tables(axis)] for axis in axes)
            grid = passes.grid(*size).long()
            grid = pad(grid, (0, 0, 0, -len(grid) % UNIT)).to(device)
            numbers = torch.arange(1, length + 1, device=device)
            text, places = [], []
            for one, two, three in zip(first, rows, columns):
                text.append(torch.cat((one[numbers], two[0].expand(length, -1), three[0].expand(length, -1)), dim=-1))
                places.append(torch.cat((two[grid[:, 1]], three[grid[:, 2]]), dim=-1))
            return _Positions((text[0], text[1]), (places[0], places[1]), (first[0], first[1]))

        return self.once(("positions", size, length, device), make)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block: it refines the image, or the text, or takes them one behind the other."""
        image, text, seen = tokens.image, tokens.text, tokens.more["seen"]
        rope = (tokens.more["cos"], tokens.more["sin"])
        assert text is not None
        length = image.shape[1]
        if block.layer_id >= _REFINERS:
            image = block(image, None, (rope[0][:, :length], rope[1][:, :length]), tokens.temb)
            return replace(tokens, image=image)
        if not block.modulation:
            return replace(tokens, text=block(text, seen, tokens.rope))
        mask = None if seen is None else torch.cat((seen.new_ones(len(seen), length), seen), dim=1)
        both = block(torch.cat((image, text), dim=1), mask, rope, tokens.temb)
        image, text = both.split((length, text.shape[1]), dim=1)
        return replace(tokens, image=image, text=text)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        patches = net.all_final_layer[_EMBEDDER](tokens.image, c=tokens.temb)[:, : tokens.size[0] * tokens.size[1]]
        return -passes.unpack_channels_last(patches, self.patch, tokens.size)

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off the tensors of the original layout. Raises KeyError."""
        width = shapes["x_pad_token"][-1]
        head = shapes["layers.0.attention.q_norm.weight"][0]
        return {
            "in_channels": shapes["x_embedder.weight"][1] // 4,
            "dim": width,
            "n_layers": count(shapes, r"layers\.(\d+)\."),
            "n_refiner_layers": count(shapes, r"noise_refiner\.(\d+)\."),
            "n_heads": width // head,
            "n_kv_heads": width // head,
            "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
            "axes_dims": [head // 4, 3 * head // 8, 3 * head // 8],
        }

    keys = (
        "".join(_ROWS.replace("{list}", name) for name in _LISTS)
        + """
all_x_embedder.2-1 = x_embedder
all_final_layer.2-1.linear = final_layer.linear
all_final_layer.2-1.adaLN_modulation.1 = final_layer.adaLN_modulation.1
t_embedder.mlp.0 = t_embedder.mlp.0
t_embedder.mlp.2 = t_embedder.mlp.2
cap_embedder.0 = cap_embedder.0
cap_embedder.1 = cap_embedder.1
x_pad_token = x_pad_token
cap_pad_token = cap_pad_token
"""
    )


def _filled(rows: Tensor) -> Tensor:
    """Repeat the last row of each sample up to a multiple of 32. Shapes: (B, N, C) -> (B, N', C)."""
    more = -rows.shape[1] % UNIT
    return torch.cat((rows, rows[:, -1:].expand(-1, more, -1)), dim=1) if more else rows
