"""Stable Diffusion 3 (Esser et al. 2024) and SD3-Light: joint transformer blocks that learn a rectified flow.

SD3-Light is a small SD3 that begins with a random transformer beside the frozen parts of any SD3. Texts may be dropped
as zeros, each encoder on its own, and text tokens reconstructed at the end of the transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, ConfigFault, DrawSpec, Fault
from difftrain.models import passes
from difftrain.models.facts import Agree, Bound, Shift, Sizes, Text, clip_bounds
from difftrain.models.families.sd3 import original_layout
from difftrain.models.families.sd3.text_branch import BranchSource, folded
from difftrain.models.family import ModelFamily
from difftrain.models.passes import Tokens
from difftrain.models.text.tokenize import Tokenize
from difftrain.models.weights.files import read_json
from difftrain.models.weights.find import parts_elsewhere, shipped_sizes, source_of
from difftrain.models.weights.folder_export import WRITTEN_BY, snippet_head
from difftrain.models.weights.keys import Rule, table_rule
from difftrain.models.weights.part_files import FACTS, PartFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from difftrain.config import TrainConfig


LIGHT = "sd3_light_pretrain"
LIGHT_LAYERS = 15
FULL = "transformer_full"  # beside an export: the transformer as it is trained, with the last block's text branch
# shipped size -> what ModelSpec calls that release; another model is the last
MODELSPECS = {
    "medium35": "stable-diffusion-v3.5-medium",
    "large35": "stable-diffusion-v3.5-large",
    "medium": "stable-diffusion-v3-medium",
}
OTHER = "stable-diffusion-v3"


def _width(s: Sizes) -> int:
    return int(s["transformer"]["num_attention_heads"] * s["transformer"]["attention_head_dim"])


def _clip_too_wide(s: Sizes) -> str:
    first, room = s["text_encoder_1"]["hidden_size"], s["transformer"]["joint_attention_dim"]
    both = first + s["text_encoder_2"]["hidden_size"]
    return "" if both <= room else f"is {first}, with text_encoder_2's {both}: more than joint_attention_dim {room}"


def _few_positions(s: Sizes) -> str:
    model = s["transformer"]
    side, most = model["sample_size"] // model["patch_size"], model["pos_embed_max_size"]
    return "" if side <= most else f"is {most}, sample_size / patch_size is {side}"


def _absent(s: Sizes) -> list[int]:
    dual = s["transformer"]["dual_attention_layers"] or ()
    return [block for block in dual if not 0 <= block < s["transformer"]["num_layers"]]


class SD3Family(ModelFamily):
    """The facts and the pass of SD3, and what SD3-Light has beside them."""

    name = "sd3"
    texts: tuple[Text, ...] = (
        Text("text_encoder_1", "tokenizer", "clip", 77, hidden=-2, pooled="text_embeds",
             hub="openai/clip-vit-large-patch14"),
        Text("text_encoder_2", "tokenizer_2", "clip", 77, hidden=-2, pooled="text_embeds", pads_zero=True,
             hub="laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"),
        Text("text_encoder_3", "tokenizer_3", "t5", 256, mask="t5_mask", hub="google/t5-v1_1-xxl"),
    )  # fmt: skip
    blocks = ("transformer_blocks",)
    shift = Shift(walks=False)
    folders = MappingProxyType({"text_encoder_1": "text_encoder"})
    zero = r"(norm1|norm1_context|norm_out)\.linear\.|^proj_out\."
    # text ends with the last block: what it asks there reaches nothing (diffusers keeps the layers, and so do checkpoints)
    silent = r"^transformer_blocks\.{last}\.attn\.(add_q_proj|norm_added_q)\."
    one_file = original_layout.ONE_FILE
    infer = staticmethod(original_layout.infer)
    vae_scales = MappingProxyType({"scaling_factor": 1.5305, "shift_factor": 0.0609, "norm_num_groups": 32})
    index = MappingProxyType({"feature_extractor": (None, None), "image_encoder": (None, None)})
    beside_sizes = ("text_branch",)
    needed = MappingProxyType({"transformer": (
        "sample_size", "patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim",
        "num_attention_heads", "joint_attention_dim", "caption_projection_dim", "pooled_projection_dim",
        "pos_embed_max_size",
    )})  # fmt: skip
    agree = (
        Agree("transformer.joint_attention_dim", lambda s: s["text_encoder_3"]["d_model"],
              "text_encoder_3's d_model: its states are concatenated with CLIP's"),
        Agree("transformer.pooled_projection_dim",
              lambda s: s["text_encoder_1"]["projection_dim"] + s["text_encoder_2"]["projection_dim"],
              "the CLIP encoders' projection_dim together"),
        Agree("transformer.caption_projection_dim", _width, "num_attention_heads x attention_head_dim"),
        Agree("transformer.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("transformer.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("text_encoder_2.max_position_embeddings", lambda s: s["text_encoder_1"]["max_position_embeddings"],
              "text_encoder's: their states are concatenated"),
        Bound("text_encoder_1.hidden_size", _clip_too_wide,
              "both CLIP states are concatenated in one token, padded with zeros"),
        Bound("transformer.attention_head_dim", lambda s: f"makes a width of {_width(s)}" if _width(s) % 4 else "",
              "positions need a multiple of 4"),
        Bound("transformer.pos_embed_max_size", _few_positions, "positions must cover an image of sample_size"),
        Bound("transformer.sample_size",
              lambda s: f"is {n}" if (n := s["transformer"]["sample_size"]) % s["transformer"]["patch_size"] else "",
              "a multiple of patch_size {transformer[patch_size]}"),
        Bound("transformer.dual_attention_layers",
              lambda s: f"names block {wrong}, of {s['transformer']['num_layers']}" if (wrong := _absent(s)) else "",
              "blocks are counted from 0"),
        Bound("vae.latents_mean", lambda s: "is not SD3's" if s["vae"]["latents_mean"] is not None else "",
              "its latents are shifted by shift_factor and scaled by scaling_factor"),
        *clip_bounds("text_encoder_1"),
        *clip_bounds("text_encoder_2"),
    )  # fmt: skip

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        *clips, t5 = self.texts
        self.texts = (*clips, replace(t5, masked=cfg.model.t5_attention_mask))

    # ------------------------------------------------------------------ the pass

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t (B, C, H, W), t (B,) in 0..1000 -> image (B, N, D), text (B, L, D), temb (B, D)."""
        image = net.pos_embed(x_t).contiguous()
        temb = net.time_text_embed(t, conditions["pooled"])
        text = net.context_embedder(conditions["tokens"])
        patch = net.config.patch_size
        return Tokens(image, text, temb, (x_t.shape[-2] // patch, x_t.shape[-1] // patch))

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one joint block; a last one without a text branch ends the text: None."""
        text, image = block(hidden_states=tokens.image, encoder_hidden_states=tokens.text, temb=tokens.temb)
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity, (B, C, H, W)."""
        patches = net.proj_out(net.norm_out(tokens.image, tokens.temb))
        return passes.unpack_channels_last(patches, net.config.patch_size, tokens.size)

    # ------------------------------------------------------------------ texts, dropped one by one

    def draws(self, latent: DrawSpec) -> dict[str, DrawSpec]:
        """Return the host draws: of the flow, and which text encoders are dropped, of tokens and pooled state alike."""
        dropped = self.texts if self.cfg.model.enable_uncond_text_dropout else ()
        own = {f"uncond_{position}": DrawSpec("uniform", trains=True) for position, _ in enumerate(dropped, start=1)}
        return super().draws(latent) | own

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return tokens (B, 77 + L, J) and pooled (B, P), with zeros for what the draws drop; in evaluation for nothing.

        CLIP's two stand side by side, filled up with zeros; T5's come behind them.
        """

        def kept(name: str, position: int) -> Tensor:
            value, u = made[f"{name}_{position}"], None if batch is None else batch.draws.get(f"uncond_{position}")
            if u is None:
                return value
            keep = (u >= self.cfg.model.uncond_text_dropout_prob).view(-1, *(1,) * (value.ndim - 1))
            return torch.where(keep, value, torch.zeros_like(value))

        clip, pooled = (
            torch.cat([kept(name, position) for position in (1, 2)], dim=-1) for name in ("hidden", "pooled")
        )
        clip = torch.nn.functional.pad(clip, (0, self.sizes["joint_attention_dim"] - clip.shape[-1]))
        return {"tokens": torch.cat([clip, kept("hidden", 3)], dim=1), "pooled": pooled}

    def without_text(self, conditions: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return what guidance starts from: zeros where training dropped texts as such."""
        dropped = self.cfg.model.enable_uncond_text_dropout
        return {name: torch.zeros_like(value) for name, value in conditions.items()} if dropped else None

    def text_settings(self, position: int) -> str:
        """Say what decides what a text encoder makes of a caption in the words of version 0.5, whose caches are read."""
        tokens = Tokenize(self.texts, self.vocabularies, self.lengths).describe(position)
        return f"{self.precision(self.texts[position - 1].part)}, {tokens}"

    # ------------------------------------------------------------------ sizes, depth and the text branch

    @cached_property
    def sizes(self) -> Mapping[str, Any]:
        """Return the transformer's sizes, defaults included."""
        return self.source.complete(self.denoiser)

    @cached_property
    def patch(self) -> int:  # type: ignore[override]
        """Latent pixels along a token's side."""
        return int(self.sizes["patch_size"])

    @cached_property
    def source(self) -> BranchSource:
        """Find the weights that the configuration names, of the depth that it asks for. Raises ConfigFault."""
        return self._at_depth(BranchSource(**vars(source_of(self.cfg, self, self.drawn_sizes))))

    def drawn_sizes(self) -> dict[str, Any]:
        """Return the sizes of parts that may be stored nowhere: of SD3-Light the transformer need be. Raises ConfigFault."""
        model = self.cfg.model
        stored = model.pretrained or model.init_from_config or model.transformer
        if model.train_type == LIGHT and not stored and parts_elsewhere(self.cfg, self):
            return {"transformer": shipped_sizes(self, "light")["transformer"]}
        return super().drawn_sizes()

    def beginning(self) -> BranchSource:
        """Return a model to begin with: a random transformer of the size's depth, the rest from the folder if there is one.

        With a folder its widths count: the transformer must fit its encoders. Raises ConfigFault.
        """
        size = shipped_sizes(self, self.cfg.model.init_from_config or "light", "--size")
        if not self.cfg.model.pretrained:
            return self.source
        depth = size["transformer"]["num_layers"]
        model = self.cfg.model.model_copy(update={"init_from_config": None, "num_layers": depth, "train_type": LIGHT})
        source = type(self)(self.cfg.model_copy(update={"model": model})).source
        readers = {part: reader for part, reader in source.readers.items() if part != "transformer"}
        note = f"the transformer starts from random weights: {depth} joint blocks, the width of the folder's"
        return replace(source, readers=readers, notes=(note,), scheduler={})

    def _at_depth(self, source: BranchSource) -> BranchSource:
        """Choose the number of blocks, and whether the stored ones are taken, with a text branch or without.

        SD3-Light begins with random weights of its own depth beside the parts of any SD3, or goes on from its own.
        """
        cfg, own, readers = self.cfg, source.num_layers, dict(source.readers)
        root = Path(cfg.model.pretrained).expanduser() if cfg.model.pretrained else None
        is_light, stored = cfg.model.train_type == LIGHT, readers.get("transformer")
        file = source.single_file
        facts = file.stored_facts() if file is not None else read_json(root / FACTS) if root is not None else {}
        begins = is_light and stored is not None and not facts.get("light")
        depth = cfg.model.num_layers or (LIGHT_LAYERS if begins else own)

        # --- the blocks: stored, or random
        notes, branchless = [], False
        if stored is None and readers:
            notes.append(f"the transformer starts from random weights: {depth} joint blocks")
        elif stored is not None and depth == own and is_light:
            notes.append(f"the transformer's weights are loaded as stored: {own} joint blocks")
        elif stored is not None and depth != own:
            if not is_light:
                what = f"is {depth}, the transformer has {own} joint blocks"
                remedy = "leave it out; train_type = 'sd3_light_pretrain' starts another depth from random weights"
                raise ConfigFault([Fault("[model] num_layers", what, remedy)])
            of_which = f"{depth} joint blocks of the stored width, of which there are {own}"
            notes.append(f"the transformer starts from random weights: {of_which}")
            del readers["transformer"]
            stored = None

        # --- the last block's text branch: as it was trained, anew, or none
        keeps_all = cfg.loss.text_recon_gamma > 0
        if stored is not None and keeps_all:
            full = stored.path.parent / FULL
            if stored.path.name == "transformer" and (full / "config.json").is_file():
                kind, mmap = self.parts["transformer"], not cfg.model.disable_mmap
                readers["transformer"] = PartFiles(full, kind, stored.flag, mmap=mmap)
                notes.append(f"the transformer is {full}: with the text branch of its last block")
            else:
                branchless, why = True, "diffusers' layout has none, and there is no transformer_full"
                notes.append(f"the last block's text branch starts anew: {why}")
        elif stored is not None and root is not None and (root / FULL).is_dir():
            notes.append(f"{root / FULL} is ignored: without text_recon_gamma the last block has no text branch")

        shift = source.scheduler.get("shift") if stored is not None else None
        return replace(
            source,
            sizes={**source.sizes, "transformer": _of_depth(source.sizes["transformer"], depth)},
            readers=readers,
            notes=(*notes, *source.notes),
            scheduler={"num_train_timesteps": 1000, "shift": float(shift)} if isinstance(shift, int | float) else {},
            text_branch=keeps_all,
            branchless=branchless,
        )

    def architecture(self) -> dict[str, Any]:
        """Return the sizes of all parts, as --init_from_config=FILE.json takes them."""
        return super().architecture() | {"text_branch": self.source.text_branch}

    def largest_side(self) -> int:
        """Return the longest side in pixels that there are positions for."""
        return int(self.token * self.sizes["pos_embed_max_size"])

    # ------------------------------------------------------------------ exports

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout; encoders keep their names."""
        return self._transformer_rule if part == self.denoiser else super().rule(part)

    def copies(self) -> Mapping[str, str]:
        """Map T5's second name of its table of words to the first."""
        return original_layout.COPIES

    @staticmethod
    def _transformer_rule(module: Any) -> Rule:
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        return table_rule(original_layout.keys(len(module.transformer_blocks)), shapes)

    @property
    def as_trained(self) -> str:  # type: ignore[override]
        """Name the folder beside an export with the whole transformer, where its last block has a text branch."""
        return FULL if self.source.text_branch else ""

    def exported(self, part: str) -> nn.Module:
        """Build a part as exports hold it, without memory."""
        return self.source.cut() if part == self.denoiser else super().exported(part)

    def folded(self, name: str, value: Tensor) -> Tensor | None:
        """Turn a tensor of the whole transformer into diffusers'; None: it has no such one."""
        return folded(name, value, self.source.num_layers)

    def facts(self) -> dict[str, Any]:
        """Return what diffusers' own files cannot say of an export, for difftrain.json."""
        model = self.cfg.model
        return super().facts() | {
            "light": model.train_type == LIGHT,
            "num_layers": self.source.num_layers,
            "unconditional": "zeros" if model.enable_uncond_text_dropout else "encoded empty text",
            "t5_max_length": model.t5_max_length,
            "t5_attention_mask": model.t5_attention_mask,
            "text_recon_gamma": self.cfg.loss.text_recon_gamma,
            FULL: self.source.text_branch,
        }

    def card(self, dtype: str) -> str:
        """Write the page beside an export. dtype: "torch.float16", of its weights."""
        return card(self.facts(), snippet_head(self.row, dtype))

    @property
    def modelspec(self) -> str:  # type: ignore[override]
        """Say which SD3 it is."""
        own = {key: _flat(value) for key, value in self.sizes.items()}
        for size, name in MODELSPECS.items():
            released = {"qk_norm": None, **shipped_sizes(self, size)["transformer"]}
            if all(own.get(key) == _flat(value) for key, value in released.items()):
                return name
        return OTHER

    def native_size(self) -> tuple[int, int] | None:
        """Return (width, height) in pixels that its positions were made for."""
        return (self.sizes["sample_size"] * self.vae.factor,) * 2

    def objective_facts(self) -> dict[str, Any]:
        """Return what a header says of the loss, the times and the texts, under kohya's names."""
        loss, model = self.cfg.loss, self.cfg.model
        made = super().objective_facts()
        own = {
            "train_type": LIGHT if model.train_type == LIGHT else None,
            **{name: made.pop(name, None) for name in ("loss_type", "pseudo_huber_c")},
            "text_recon_gamma": loss.text_recon_gamma or None,
            "text_recon_target_layer": loss.text_recon_target_layer if loss.text_recon_gamma else None,
            **made,
            "t5_max_length": model.t5_max_length,
            "t5_attention_mask": model.t5_attention_mask,
            "uncond_text_dropout_prob": model.uncond_text_dropout_prob if model.enable_uncond_text_dropout else None,
        }
        return {name: value for name, value in own.items() if value is not None}


def _flat(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_depth(transformer: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the same sizes with another number of joint blocks."""
    made = {**transformer, "num_layers": num_layers}
    if "dual_attention_layers" in made:
        made["dual_attention_layers"] = tuple(i for i in made["dual_attention_layers"] or () if i < num_layers)
    return made


# --- The page beside an exported SD3: how to draw with it. Prose, so apart from the family's code


_ZEROS = """
This model was trained with texts dropped as **zeros**: that is what guidance starts from, not the encoded empty text.

```python
{head}tokens, _, pooled, _ = pipe.encode_prompt("a red cat", None, None, max_sequence_length={length})
image = pipe(
    prompt_embeds=tokens, pooled_prompt_embeds=pooled,
    negative_prompt_embeds=torch.zeros_like(tokens), negative_pooled_prompt_embeds=torch.zeros_like(pooled),
).images[0]
```
"""
_EMPTY = """
Guidance starts from the **encoded empty text**, which is what diffusers takes where no negative prompt is given.

```python
{head}image = pipe("a red cat", max_sequence_length={length}).images[0]
```
"""
_MASKED = """
T5 was read with its attention mask, and rows at its pad positions were zeros: diffusers' own `encode_prompt` does
neither, so pass `prompt_embeds` that are made so.
"""
_FULL = """
`transformer_full/` has the transformer as trained: with the text branch of its last block, which reconstructs the text
and is not needed for sampling. Training continues from it; diffusers ignores it.
"""


def card(facts: Mapping[str, Any], head: str) -> str:
    """Write the page. facts: what difftrain.json says. head: the lines that load the folder."""
    kind = "SD3-Light" if facts["light"] else "Stable Diffusion 3"
    text = f"# {kind}, {facts['num_layers']} joint blocks\n\n{WRITTEN_BY} {facts['difftrain']}.\n"
    text += _ZEROS if facts["unconditional"] == "zeros" else _EMPTY
    text = text.replace("{length}", str(facts["t5_max_length"])).replace("{head}", head)
    text += _MASKED if facts["t5_attention_mask"] else ""
    return text + (_FULL if facts["transformer_full"] else "")
