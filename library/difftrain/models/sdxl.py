"""Stable Diffusion XL (Podell et al. 2023): a UNet that reads two CLIP encoders and the sizes of the picture.

Epsilon or v-prediction over 1000 scaled-linear steps. The text encoders may be trained with it; captions may be longer
than 77 tokens and weigh; any layer of the encoders may be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Bucket, Fault, Group, Parts
from difftrain.models import flops, passes
from difftrain.models.facts import Agree, OneFile, Sizes, Text
from difftrain.models.family import ModelFamily
from difftrain.models.objective.ddpm import DdpmObjective
from difftrain.models.text.clip_tokens import CHUNK, ClipTokenize, chunks_of
from difftrain.models.weights import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.root import DenoiserRoot
    from difftrain.models.weights.keys import Rule


CLIP_SKIP = 2  # SDXL's: hidden_states[-2]; 1 is the last layer's output, before its norm
SIZE_FEATURES = ("original_size", "crop_top_left", "target_size")  # (B, 2) each, height or top first
PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder_1": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
# tensors of single files that are no weights of a module: written for readers that expect them, ignored when read
POSITION_IDS = PREFIXES["text_encoder_1"] + "text_model.embeddings.position_ids"
LOGIT_SCALE = PREFIXES["text_encoder_2"] + "logit_scale"
# tables and marks that trainers and mergers leave beside the weights
IGNORED = (
    r"^(betas|alphas_cumprod.*|sqrt_.*|log_one_minus_.*|posterior_.*|logvar|model_ema\..*|denoiser\.sigmas"
    r"|v_pred|ztsnr|edm_vpred\..*|edm_(mean|std)|difftrain\..*)$"
)
_HUB_IDS = ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k")  # kohya's


class SDXLFamily(DdpmObjective, ModelFamily):
    """The facts of an SDXL model, the UNet's call, and what kohya's tools can do with it."""

    name = "sdxl"
    modelspec = "stable-diffusion-xl-v1-base"
    kohya_name = "sdxl_base_v1-0"
    folders = MappingProxyType({"text_encoder_1": "text_encoder"})
    texts: tuple[Text, ...] = (
        Text("text_encoder_1", "tokenizer", "clip", 77, hidden=-CLIP_SKIP, hub=_HUB_IDS[0]),
        Text(
            "text_encoder_2", "tokenizer_2", "clip", 77, hidden=-CLIP_SKIP, pooled="text_embeds", pooled_as="pooled",
            pads_zero=True, hub=_HUB_IDS[1],
        ),
    )  # fmt: skip
    vae_scales = None
    draws_trained_size = False  # a prompt without a size is drawn with the model's own, up to 512 (kohya)
    named_hashes = True
    widens_text = False
    one_file = OneFile(
        prefixes=PREFIXES,
        released="base",
        layout="SDXL's original layout has model.diffusion_model., first_stage_model. and conditioner.embedders.0 and 1",
        beside=(POSITION_IDS, LOGIT_SCALE),
        ignored=IGNORED,
    )
    # dropped captions are trained as the encoded empty text (kohya), so that is what "no prompt" means here, not zeros
    index = MappingProxyType({
        "feature_extractor": [None, None], "image_encoder": [None, None], "force_zeros_for_empty_prompt": False,
    })  # fmt: skip
    needed = MappingProxyType({
        "unet": (
            "in_channels", "out_channels", "block_out_channels", "down_block_types", "up_block_types",
            "layers_per_block", "transformer_layers_per_block", "attention_head_dim", "cross_attention_dim",
            "addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim",
        ),
    })  # fmt: skip
    agree = (
        Agree("unet.cross_attention_dim", lambda s: s["text_encoder_1"]["hidden_size"] + s["text_encoder_2"]["hidden_size"],
              "the text encoders' widths together"),
        Agree("unet.projection_class_embeddings_input_dim",
              lambda s: 6 * s["unet"]["addition_time_embed_dim"] + s["text_encoder_2"]["projection_dim"],
              "6 x addition_time_embed_dim + text_encoder_2's projection_dim"),
        Agree("unet.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
        Agree("unet.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
    )  # fmt: skip

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        self.clip_skip = cfg.model.clip_skip or CLIP_SKIP
        self.texts = tuple(replace(text, hidden=-self.clip_skip) for text in type(self).texts)

    # ------------------------------------------------------------------ the UNet

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return time_ids (B, 6) and, of each text encoder, its output where it is frozen, else the ids for it."""
        if batch is None:
            return made
        sizes = [batch.features[name] for name in SIZE_FEATURES]
        return {"time_ids": torch.cat(sizes, dim=1).float(), **made}

    def size_features(self, size_hw: tuple[int, int], count: int) -> dict[str, Tensor]:
        """Return the sizes of pictures that are drawn whole: original and target are their own, nothing is cropped."""
        own, corner = torch.tensor(size_hw).repeat(count, 1), torch.zeros((count, 2), dtype=torch.int64)
        return dict(zip(SIZE_FEATURES, (own, corner, own), strict=True))

    def denoise(
        self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor], plan: passes.PassPlan
    ) -> passes.PassOutputs:
        """Predict noise or velocity. Shapes: x_t (B, C, H, W), t (B,), hidden_1 (B, L, D1), hidden_2 (B, L, D2)."""
        first, second = conditions["hidden_1"], conditions["hidden_2"]
        hidden = torch.cat([first, second.to(first.dtype)], dim=-1)
        added = {"text_embeds": conditions["pooled"], "time_ids": conditions["time_ids"]}
        return passes.PassOutputs(net(x_t, t, hidden, added_cond_kwargs=added, return_dict=False)[0])

    @property
    def patch(self) -> int:  # type: ignore[override]
        """Latent pixels that both sides of a picture are multiples of: each level of the UNet but the last halves them."""
        return 2 ** (len(self.source.sizes["unet"]["block_out_channels"]) - 1)

    @property
    def drawn_unit(self) -> int:
        """Pixels that both sides of a drawn picture are multiples of: the UNet brings odd levels together itself."""
        return self.vae.factor

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks in the order in which they run."""
        layers = [(name, m) for name, m in parts.root.named_modules() if type(m).__name__ == "CLIPEncoderLayer"]
        unet: Any = parts.root.get_submodule("unet")
        names = [f"down_blocks.{i}" for i in range(len(unet.down_blocks))] + ["mid_block"]
        names += [f"up_blocks.{i}" for i in range(len(unet.up_blocks))]
        return layers + [(f"unet.{name}", unet.get_submodule(name)) for name in names]

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the blocks that recur, each compiled once a width; whole UNet blocks would unroll dozens of them."""
        kinds = ("BasicTransformerBlock", "ResnetBlock2D", "CLIPEncoderLayer")
        return [module for module in parts.root.modules() if type(module).__name__ in kinds]

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count forward and backward of one sample (see flops.py)."""
        latent = (bucket.height // self.vae.factor, bucket.width // self.vae.factor)
        chunks = chunks_of(self.cfg.model.max_token_length)
        return flops.sdxl_flops(self.source.sizes, latent, num_chunks=chunks, trained=self.rates)

    # ------------------------------------------------------------------ captions

    @property
    def skips(self) -> bool:
        """Tell whether other states of the encoders are read than SDXL's."""
        return self.clip_skip != CLIP_SKIP

    def tokenizer(self, parts: Parts) -> ClipTokenize:  # type: ignore[override]
        """Return the picklable function from captions to ids (B, N, 77) of both encoders. Raises ConfigFault."""
        model = self.cfg.model
        return ClipTokenize(self.vocabularies, model.max_token_length, weighted=self.cfg.captions.weighted)

    def _length(self, text: Text) -> int:
        return CHUNK * chunks_of(self.cfg.model.max_token_length) + 2

    def text_settings(self, position: int) -> str:
        """Say all that decides what a text encoder makes of a caption, weights aside, for its fingerprint."""
        tokens = f"tokens {ClipTokenize.digest(self.vocabularies)} in {chunks_of(self.cfg.model.max_token_length)}"
        return f"clip_skip {self.clip_skip}, {self.precision(self.texts[position - 1].part)}, {tokens}"

    def reader(self, text: Text) -> str:
        """Name who decides which states of an encoder are read, for messages."""
        return f"{option('model.clip_skip')}={self.clip_skip}" if self.skips else self.row.title

    def remarks(self) -> list[str]:
        """Say where weights predict something else, and how a model of other layers is used: no format carries that."""
        notes, wanted = [], self.cfg.model.prediction_type
        if (prediction := self._prediction_of_source()) not in (None, wanted):
            notes.append(f"these weights say that they predict {prediction}; this run trains {wanted}")
        if self.skips:
            notes.append(
                f"clip_skip {self.clip_skip}: draw with the same clip skip; in diffusers, which counts from SDXL's own, "
                f"that is clip_skip={self.clip_skip - CLIP_SKIP}"
            )
        return notes

    def _prediction_of_source(self) -> str | None:
        file = self.source.single_file
        if file is None:
            return self.source.scheduler.get("prediction_type")
        if {"v_pred", "edm_vpred.sigma_max"} & file.marks:
            return "v_prediction"
        return {"v": "v_prediction", "epsilon": "epsilon"}.get(file.header.get("modelspec.prediction_type", ""))

    # ------------------------------------------------------------------ rates, checks

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group parameters by part, and by the UNet's blocks where they have rates of their own."""
        groups, rates = super().param_groups(root), self.cfg.optimizer.block_lr
        if not rates or "unet" not in self.rates:
            return groups
        return [*block_groups(root.get_submodule("unet"), groups[0].named_params, rates), *groups[1:]]

    def freeze(self, parts: Parts, root: DenoiserRoot) -> list[str]:
        notes = super().freeze(parts, root)
        return notes + (freeze_blocks(root.denoiser, self.cfg.optimizer.block_lr) if "unet" in self.rates else [])

    def faults(self, net: nn.Module) -> list[Fault]:
        """Find what a configuration asks of this model and it has not. net: without weights."""
        problems = super().faults(net) + block_faults(net, self.cfg.optimizer.block_lr)
        layers = min(self.source.sizes[text.part]["num_hidden_layers"] for text in self.texts)
        if self.clip_skip > layers:
            what = f"is {self.clip_skip}, a text encoder here has {layers} layers"
            problems.append(Fault(option("model.clip_skip"), what, "2 is SDXL's"))
        return problems

    def misfits(self, sizes: Sizes, where: str) -> list[Fault]:
        """Name what does not fit together, before a weight is read."""
        made, taken = sizes["vae"].get("latent_channels"), sizes["unet"].get("in_channels")
        if self.cfg.model.vae and made != taken:
            return [
                Fault(
                    option("model.vae"),
                    f"{self.cfg.model.vae} makes {made} latent channels, the UNet takes {taken}",
                )
            ]
        if sizes["vae"].get("latents_mean") is not None:
            what = "latents_mean is not SDXL's: its latents are scaled by scaling_factor alone"
            return [Fault(f"{where} [vae]", what)]
        return super().misfits(sizes, where)

    # ------------------------------------------------------------------ files

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout."""
        own = {"unet": keys.unet_rule, "text_encoder_2": keys.clip_rule}
        return own.get(part) or super().rule(part)

    def beside(self, parts: Parts) -> dict[str, Tensor]:
        """Return two tensors that the released file has; the contrastive temperature is the loaded file's, or OpenCLIP's."""
        file = self.source.single_file
        stored = file is not None and LOGIT_SCALE in file.marks
        scale = file.get(LOGIT_SCALE) if file and stored else torch.tensor(math.log(1 / 0.07))
        length = self.source.complete("text_encoder_1")["max_position_embeddings"]
        return {POSITION_IDS: torch.arange(length)[None], LOGIT_SCALE: scale}

    def model_index(self, classes: Mapping[str, Any]) -> dict[str, Any]:
        """Return what model_index.json says, in its usual order."""
        return {**dict(sorted(classes.items())), **self.index}

    def header_facts(self) -> dict[str, str | None]:
        """Return what modelspec says of this model, by its names."""
        native = self.source.sizes["unet"].get("sample_size", 128) * self.vae.factor
        width, height = self.cfg.data.resolution or (native, native)
        return {"architecture": self.modelspec, "resolution": f"{width}x{height}", **super().header_facts()}


# --- The UNet's blocks as kohya's --block_lr counts them, by the names of the original layout
# Of n input and n output blocks (9 in SDXL): 0 is the time and label embeddings, 1 to n the input blocks, then the three
# parts of the middle block, the n output blocks, and last the way out.


_MIDDLE = 3


def num_blocks(unet: Any) -> int:
    """Count the blocks: 23 in SDXL."""
    return 2 * _inputs(unet) + _MIDDLE + 2


def _inputs(unet: Any) -> int:
    return len(unet.config.block_out_channels) * (unet.config.layers_per_block + 1)


def block_of(unet: Any) -> Mapping[str, int]:
    """Map every tensor of the UNet, by its name in the module, to its block."""
    number = _inputs(unet)
    starts = {"input_blocks": 1, "middle_block": 1 + number, "output_blocks": 1 + number + _MIDDLE}
    blocks, rule = {}, keys.unet_rule(unet)
    for name in unet.state_dict():
        key = rule(name).key
        numbered = re.match(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.", key)
        if numbered:
            blocks[name] = starts[numbered[1]] + int(numbered[2])
        else:
            blocks[name] = 0 if key.startswith(("time_embed.", "label_emb.")) else num_blocks(unet) - 1
    return blocks


def block_faults(unet: Any, rates: tuple[float, ...]) -> list[Fault]:
    """Say where there is not one rate for each block of this UNet."""
    if not rates or len(rates) == num_blocks(unet):
        return []
    n = _inputs(unet)
    remedy = f"1 for the embeddings, {n} input, {_MIDDLE} middle, {n} output, 1 for the way out"
    return [
        Fault(
            option("optimizer.block_lr"),
            f"has {len(rates)} values, this UNet has {num_blocks(unet)} blocks",
            remedy,
        )
    ]


def block_groups(unet: Any, named: list[tuple[str, Any]], rates: tuple[float, ...]) -> list[Group]:
    """Group what is trained by block, named as in kohya's logs. named: parameters under root's names."""
    blocks = block_of(unet)
    groups = {block: Group(f"block{block}", [], rate) for block, rate in enumerate(rates) if rate > 0}
    for name, parameter in named:
        groups[blocks[name.removeprefix("unet.")]].named_params.append((name, parameter))
    return list(groups.values())


def freeze_blocks(unet: Any, rates: tuple[float, ...]) -> list[str]:
    """Freeze the blocks whose rate is 0; return a sentence that names them, or nothing."""
    frozen = [block for block, rate in enumerate(rates) if rate == 0]
    for name, block in block_of(unet).items() if frozen else ():
        if block in frozen:
            unet.get_parameter(name).requires_grad_(False)
    return (
        [f"UNet blocks {', '.join(map(str, frozen))} are frozen: {option('optimizer.block_lr')} is 0 there"]
        if frozen
        else []
    )
