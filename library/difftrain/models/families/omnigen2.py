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

from difftrain.contracts import Batch, Parts, control_name
from difftrain.models.facts import Agree, AreaShift, Bound, Shift, Sizes, Text
from difftrain.models.one_stream import OneStreamFamily
from difftrain.models.passes import Tokens, grid, pack_channels_last, unpack_channels_last

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


class OmniGen2(OneStreamFamily):
    """The facts of an OmniGen2 model. Loading, caching, noising, loss, export, FLOPs and sampling follow from them."""

    name = "omnigen2"
    modelspec = "omnigen2"
    texts = (
        Text("text_encoder", "processor", "llm", _LENGTH, hidden=-1, template=TEMPLATE, masked=True, passes_mask=True),
    )  # fmt: skip
    folders = MappingProxyType({"text_encoder": "mllm"})
    blocks: tuple[str, ...] = ("context_refiner", "noise_refiner", _REFINER, "layers")
    shift = Shift(dynamic=(256, 4096, 0.5, 1.15), mu=AreaShift(20.0))
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
        mask, shown = self.caption_mask(text, conditions), conditions.get(SHOWN)
        shown = mask.new_ones(len(mask)) if shown is None else shown
        return Tokens(
            torch.cat(images, dim=1), text, temb, size, more=self._places(net, mask, shown, size, len(images) - 1)
        )

    def _places(
        self, net: Any, mask: Tensor, shown: Tensor, size: tuple[int, int], references: int
    ) -> dict[str, Tensor]:
        """Lay out captions, references and images, and say what refines them. Shapes: mask (B, L), shown (B,)."""
        patches, side = size[0] * size[1], max(size)
        lengths = (mask.shape[1], references * patches, patches)
        is_token = torch.cat((mask, shown[:, None].expand(-1, lengths[1]), mask.new_ones(len(mask), patches)), dim=1)

        # --- positions: of images as if no text were there, then moved behind the sample's own
        def cells() -> Tensor:
            of_text = torch.arange(lengths[0]).view(-1, 1).expand(-1, 3)
            return torch.cat(
                (of_text, *(grid(*size, first=number * side) for number in range(references)), grid(*size))
            )

        ends = mask.sum(dim=1, keepdim=True)
        starts = (torch.zeros_like(ends), ends, ends + shown[:, None] * references * side)
        moved = torch.cat([start.expand(-1, length) for start, length in zip(starts, lengths, strict=True)], dim=1)
        more, (text, others, image) = self.lay_out(
            net, is_token, self.cells((size, lengths), cells, mask.device), moved, lengths
        )
        return {**more, "mask": mask, "text": text, "image": image, **({_REFINER: others} if references else {})}

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
            text, others, image = self.over_all(block, (tokens.text, others, image), more, tokens.temb)
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
        made = OneStreamFamily.sizes(shapes, "ref_image_patch_embedder.weight", "layers.0.attn.norm_q.weight")
        head = made["hidden_size"] // made["num_attention_heads"]
        return {
            **made,
            "num_kv_heads": shapes["layers.0.attn.to_k.weight"][0] // head,
            "text_feat_dim": shapes["time_caption_embed.caption_embedder.0.weight"][0],
        }
