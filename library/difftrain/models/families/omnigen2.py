"""OmniGen2 (VectorSpaceLab 2025, arXiv:2506.18871): one stream of text, references and the image that is drawn.

Text, image and references are refined apart; then a sequence is a caption's tokens, the references one behind the other,
the image, and padding that nobody looks at. A text token stands at its number on all three axes of positions; an image's
tokens stand at one number on the first, and in rows and columns on the others. Each reference moves what follows it on by
its longer side in tokens. diffusers does not have it: the network is models/networks/omnigen2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from difftrain.contracts import Batch, Parts, control_name
from difftrain.device.rotary import tables_of_pairs
from difftrain.models.facts import Agree, AreaShift, Bound, Lora, Shift, Sizes, Text
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens, grid, laid, pack_channels_last, packed, unpack_channels_last
from difftrain.models.weights.infer import count

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant that generates high-quality images based on user instructions.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n"
)
_LENGTH = 256
SHOWN = "shown"  # of conditions: which samples see their references, (B,) bool; absent: all
_REFINER = "ref_image_refiner"
_PUBLISHED = {
    "transformer": ["omnigen2.models.transformers.transformer_omnigen2", "OmniGen2Transformer2DModel"],
    "scheduler": ["omnigen2.schedulers.scheduling_flow_match_euler_discrete", "FlowMatchEulerDiscreteScheduler"],
}


def _short(s: Sizes) -> str:
    lengths = s["transformer"]["axes_lens"]
    return f"is {lengths}" if min(lengths) <= _LENGTH else ""


class OmniGen2(ModelFamily):
    """The facts of an OmniGen2 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "omnigen2"
    modelspec = "omnigen2"
    texts = (
        Text("text_encoder", "processor", "llm", _LENGTH, hidden=-1, template=TEMPLATE, masked=True, passes_mask=True),
    )  # fmt: skip
    folders = MappingProxyType({"text_encoder": "mllm"})
    blocks: tuple[str, ...] = ("context_refiner", "noise_refiner", _REFINER, "layers")
    shift = Shift(dynamic=(256, 4096, 0.5, 1.15), mu=AreaShift(20.0))
    zero = r"\.norm1\.linear\.|^norm_out\."
    leaving = r"norm_out\b"
    vae_scales = MappingProxyType({"scaling_factor": 0.3611, "shift_factor": 0.1159, "norm_num_groups": 32})
    lora = Lora(("to_q", "to_k", "to_v", "to_out.0", "linear_1", "linear_2", "linear_3"))
    agree = (
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree(
            "transformer.text_feat_dim", lambda s: s["text_encoder"]["text_config"]["hidden_size"],
            "the language model's hidden_size",
        ),
        Agree("transformer.patch_size", lambda s: 2, "a token is 2x2 latent pixels"),
        Bound("transformer.axes_lens", _short, f"each is more than the {_LENGTH} tokens of a caption"),
    )  # fmt: skip

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        if not self.num_control:  # no loss reaches what is for references
            self.blocks = tuple(member for member in self.blocks if member != _REFINER)
            self.unread = rf"^({_REFINER}\.|ref_image_patch_embedder\.|image_index_embedding)"
        self._tables: dict[Any, list[Tensor]] = {}
        self._cells: dict[Any, Tensor] = {}

    def references(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return the latents of references, and which samples see theirs: a reference that is dropped is no token."""
        made, seen = super().references(batch, parts), self.shown(batch)
        if made:
            first = next(iter(made.values()))
            made[SHOWN] = first.new_ones(len(first), dtype=torch.bool) if seen is None else seen.to(first.device)
        return made

    def without_references(self, shown: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hide the references from the prediction that guidance starts from, as the pipeline does where it guides by text alone."""
        return {**shown, SHOWN: torch.zeros_like(shown[SHOWN])} if SHOWN in shown else shown

    # ------------------------------------------------------------------ the pass

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t and each of R references (B, C, H, W), t (B,) in 0..1000 -> image ((1 + R) N, D)."""
        temb, text = net.time_caption_embed(x_t, 1.0 - t / 1000.0, conditions["tokens"])
        size = (x_t.shape[-2] // self.patch, x_t.shape[-1] // self.patch)
        images = [net.x_embedder(pack_channels_last(x_t, self.patch))]
        for number in range(self.num_control):
            if (shown := conditions.get(control_name(number))) is not None:
                tokens = net.ref_image_patch_embedder(pack_channels_last(shown, self.patch))
                images.append(tokens + net.image_index_embedding[number])
        mask, shown = conditions.get("mask"), conditions.get(SHOWN)
        mask = text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask
        shown = mask.new_ones(len(mask)) if shown is None else shown
        return Tokens(
            torch.cat(images, dim=1), text, temb, size, more=self._places(net, mask, shown, size, len(images) - 1)
        )

    def _places(
        self, net: Any, mask: Tensor, shown: Tensor, size: tuple[int, int], references: int
    ) -> dict[str, Tensor]:
        """Lay out each sample's sequence: caption, references, image, padding. Shapes: mask (B, L), shown (B,).

        order, back: (B, S) which token stands at a slot, and where it went; seen: (B, S); rotary tables of the sequence, of
        text, of image and of references alone, cosines and sines, (2, B, ., D).
        """
        patches, side = size[0] * size[1], max(size)
        lengths = (mask.shape[1], references * patches, patches)
        see = shown[:, None].expand(-1, lengths[1])
        order, back, seen = packed(torch.cat((mask, see, mask.new_ones(len(mask), patches)), dim=1))

        # --- positions: of images as if no text were there, then moved behind the sample's own
        key = (size, lengths, mask.device)
        if key not in self._cells:  # moved once a size
            of_text = torch.arange(lengths[0]).view(-1, 1).expand(-1, 3)
            of_images = [grid(*size, first=number * side) for number in range(references)]
            self._cells[key] = torch.cat((of_text, *of_images, grid(*size))).to(mask.device, torch.int64)
        ends = mask.sum(dim=1, keepdim=True)
        starts = (torch.zeros_like(ends), ends, ends + shown[:, None] * references * side)
        moved = torch.cat([start.expand(-1, length) for start, length in zip(starts, lengths, strict=True)], dim=1)
        apart = self._rotary(net, self._cells[key] + F.pad(moved.unsqueeze(-1), (0, 2)))
        text, others, image = apart.split(lengths, dim=2)
        joint = apart.gather(2, order[None, :, :, None].expand_as(apart))
        places = {
            "order": order,
            "back": back,
            "mask": mask,
            "seen": seen,
            "joint": joint,
            "text": text,
            "image": image,
        }
        return places | ({_REFINER: others} if references else {})

    def _rotary(self, net: Any, lies: Tensor) -> Tensor:
        """Look positions (B, S, 3) up in the tables of each axis, real-valued: (2, B, S, D)."""
        if lies.device not in self._tables:
            self._tables[lies.device] = [table.to(lies.device) for table in net.rope_embedder.freqs_cis]
        turned = [F.embedding(lies[..., axis], table) for axis, table in enumerate(self._tables[lies.device])]
        return torch.stack(tables_of_pairs(torch.cat(turned, dim=-1)))

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block: of those that refine text, image or references alone, or of those over all."""
        assert tokens.text is not None
        more, patches = tokens.more, tokens.size[0] * tokens.size[1]
        if not block.modulation:
            return replace(tokens, text=block(tokens.text, more["mask"], more["text"].unbind(0)))
        image, others = tokens.image[:, :patches], tokens.image[:, patches:]
        if tokens.member == "noise_refiner":
            image = block(image, None, more["image"].unbind(0), tokens.temb)
        elif tokens.member == _REFINER:
            if not others.shape[1]:  # none are shown to this batch
                return tokens
            others = self._refined(block, others, more[_REFINER], tokens.temb, patches)
        else:
            joined = torch.cat((tokens.text, others, image), dim=1)
            joined = block(laid(joined, more["order"]), more["seen"], more["joint"].unbind(0), tokens.temb)
            lengths = (tokens.text.shape[1], others.shape[1], patches)
            text, others, image = laid(joined, more["back"]).split(lengths, dim=1)
            tokens = replace(tokens, text=text)
        return replace(tokens, image=torch.cat((image, others), dim=1))

    @staticmethod
    def _refined(block: Any, others: Tensor, tables: Tensor, temb: Tensor, patches: int) -> Tensor:
        """Refine each reference by itself. Shapes: others (B, R N, D), tables (2, B, R N, D)."""
        apart = others.unflatten(1, (-1, patches))
        rope = tables.unflatten(2, (-1, patches)).flatten(1, 2).unbind(0)
        return (
            block(apart.flatten(0, 1), None, rope, temb.repeat_interleave(apart.shape[1], 0))
            .unflatten(0, apart.shape[:2])
            .flatten(1, 2)
        )

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W): the network says x0 - e, channels lie fastest in a token."""
        patches = net.norm_out(tokens.image[:, : tokens.size[0] * tokens.size[1]], tokens.temb)
        return -unpack_channels_last(patches, self.patch, tokens.size)

    # ------------------------------------------------------------------ files and bounds

    def tokenizer_class(self, text: Text, vocabulary: Any) -> str:
        """Return the processor that a release has in place of a tokenizer, or the tokenizer of a small vocabulary."""
        return "Qwen2_5_VLProcessor" if vocabulary.reads_pictures else super().tokenizer_class(text, vocabulary)

    def model_index(self, classes: Mapping[str, Any]) -> dict[str, Any]:
        """Name the classes of the published package, whose pipeline reads the folder."""
        return super().model_index({**classes, **_PUBLISHED})

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'prompt="make it red", input_images=[reference]' if self.num_control else 'prompt="a red cat"'

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for, references included."""
        first, *others = self.source.complete(self.denoiser)["axes_lens"]
        behind = [(first - self.lengths[0] - 1) // self.num_control] if self.num_control else []
        return int(self.token * min(*others, *behind))

    @staticmethod
    def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Read the transformer's sizes off its tensors, which are called alike in every layout. Raises KeyError."""
        width, entering = shapes["ref_image_patch_embedder.weight"]
        head = shapes["layers.0.attn.norm_q.weight"][0]
        return {
            "in_channels": entering // 4,
            "hidden_size": width,
            "num_layers": count(shapes, r"layers\.(\d+)\."),
            "num_refiner_layers": count(shapes, r"noise_refiner\.(\d+)\."),
            "num_attention_heads": width // head,
            "num_kv_heads": shapes["layers.0.attn.to_k.weight"][0] // head,
            "axes_dim_rope": [head // 3] * 3,
            "text_feat_dim": shapes["time_caption_embed.caption_embedder.0.weight"][0],
        }
