"""What families of a UNet over CLIP's texts have in common: noise or velocity over 1000 scaled-linear steps.

Captions may be longer than 77 tokens and weigh; the text encoders may be trained with the UNet; any layer of theirs may
be read. A family adds its facts and what its UNet is told beside x_t and t.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Bucket, Carry, Fault, Group, Inputs, Parts
from difftrain.models import flops, passes
from difftrain.models.facts import Agree, Lora, Sizes, Text
from difftrain.models.family import ModelFamily
from difftrain.models.objective.ddpm import DdpmObjective
from difftrain.models.row import UNET_TARGETS
from difftrain.models.stages import Owners
from difftrain.models.text.clip_tokens import CHUNK, ClipTokenize, chunks_of
from difftrain.models.weights import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.weights.keys import Rule


UNET_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
# tables and marks that trainers and mergers leave beside the weights
IGNORED = (
    r"^(betas|alphas_cumprod.*|sqrt_.*|log_one_minus_.*|posterior_.*|logvar|model_ema\..*|denoiser\.sigmas"
    r"|v_pred|ztsnr|edm_vpred\..*|edm_(mean|std)|difftrain\..*)$"
)
NEEDED = (
    "in_channels", "out_channels", "block_out_channels", "down_block_types", "up_block_types", "layers_per_block",
    "attention_head_dim", "cross_attention_dim",
)  # fmt: skip
LATENT_CHANNELS = (
    Agree("unet.in_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
    Agree("unet.out_channels", lambda s: s["vae"]["latent_channels"], "the VAE's latent_channels"),
)


class UNetFamily(DdpmObjective, ModelFamily):
    """A UNet, its CLIP encoders, and what kohya's tools can do with them.

    own_skip: the clip skip that the family was trained with. native: the latent side of a UNet whose sizes say none.
    """

    lora = Lora(UNET_TARGETS, kohya="diffusers")
    own_skip: ClassVar[int]
    native: ClassVar[int] = 64
    vae_scales = None
    draws_trained_size = False  # a prompt without a size is drawn with the model's own, up to 512 (kohya)
    named_hashes = True
    widens_text = False
    needed: Mapping[str, tuple[str, ...]] = MappingProxyType({"unet": NEEDED})

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        self.clip_skip = cfg.model.clip_skip or self.own_skip
        self._step_flops: dict[Bucket, float] = {}
        self.texts = tuple(replace(text, hidden=self.read_state(text)) for text in type(self).texts)

    def read_state(self, text: Text) -> int | Literal["last"]:
        """Return which state of an encoder is read: hidden_states[-clip_skip]."""
        return -self.clip_skip

    # ------------------------------------------------------------------ the UNet

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
        if self.cfg.adapter.type is not None:
            return self._flops_with_adapters(bucket, chunks)
        return flops.unet_step_flops(self.source.sizes, self.texts, latent, num_chunks=chunks, trained=self.rates)

    def _flops_with_adapters(self, bucket: Bucket, chunks: int) -> float:
        """Count the UNet with its adapters, and encoders that have some at twice their forward: none of their weights has a gradient."""
        if bucket not in self._step_flops:
            alone = self.cfg.model.model_copy(update={"train_text_encoder": False})
            family: Any = type(self)(self.cfg.model_copy(update={"model": alone}))
            texts = [self.source.sizes[text.part] for text in self.texts if text.part in self.rates]
            texts_flops = sum(2 * flops.text_flops(config, chunks) for config in texts)
            self._step_flops[bucket] = flops.step_on_meta(family, bucket) + texts_flops
        return self._step_flops[bucket]

    def unet_conditions(self, conditions: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return what the UNet reads across, (B, L, D), and what is added to its time embedding, by diffusers' names."""
        raise NotImplementedError

    def denoise(
        self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor], plan: passes.PassPlan
    ) -> passes.PassOutputs:
        """Predict noise or velocity. Shapes: x_t (B, C, H, W), t (B,)."""
        hidden, added = self.unet_conditions(conditions)
        return passes.PassOutputs(net(x_t, t, hidden, added_cond_kwargs=added, return_dict=False)[0])

    def chain(self, root: nn.Module) -> UNetChain:  # type: ignore[override]
        """Return the pass of a root as a row of the UNet's blocks, for a pipeline."""
        return UNetChain(root, self)

    # ------------------------------------------------------------------ captions

    @property
    def skips(self) -> bool:
        """Tell whether other states of the encoders are read than the family's."""
        return self.clip_skip != self.own_skip

    def tokenizer(self, parts: Parts) -> ClipTokenize:  # type: ignore[override]
        """Return the picklable function from captions to ids (B, N, 77) of all encoders. Raises ConfigFault."""
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
        notes, expected = [], self.cfg.model.prediction_type
        if (prediction := self._prediction_of_source()) not in (None, expected):
            notes.append(f"these weights are for {prediction} prediction; this run trains {expected}")
        if self.skips:
            notes.append(
                f"clip_skip {self.clip_skip}: sample with the same clip skip; in diffusers, which counts from "
                f"{self.row.title}'s own, that is clip_skip={self.clip_skip - self.own_skip}"
            )
        return notes

    def _prediction_of_source(self) -> str | None:
        file = self.source.single_file
        if file is None:
            return self.source.scheduler.get("prediction_type")
        if {"v_pred", "edm_vpred.sigma_max"} & file.marks:
            return "v_prediction"
        return {"v": "v_prediction", "epsilon": "epsilon"}.get(file.header.get("modelspec.prediction_type", ""))

    # ------------------------------------------------------------------ checks

    def faults(self, net: nn.Module) -> list[Fault]:
        """Find what a configuration asks of this model and it has not. net: without weights."""
        problems = super().faults(net)
        layers = min(self.source.sizes[text.part]["num_hidden_layers"] for text in self.texts)
        if self.clip_skip > layers:
            what = f"is {self.clip_skip}, a text encoder here has {layers} layers"
            problems.append(Fault(option("model.clip_skip"), what, f"{self.own_skip} is {self.row.title}'s"))
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
            what = f"latents_mean is not {self.row.title}'s: its latents are scaled by scaling_factor only"
            return [Fault(f"{where} [vae]", what)]
        return super().misfits(sizes, where)

    # ------------------------------------------------------------------ files

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout."""
        return keys.unet_rule if part == "unet" else super().rule(part)

    def model_index(self, classes: Mapping[str, Any]) -> dict[str, Any]:
        """Return what model_index.json says, in its usual order."""
        return {**dict(sorted(classes.items())), **self.index}

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline: diffusers counts skipped layers from the family's own."""
        return f"{super().call}, clip_skip={self.clip_skip - self.own_skip}" if self.skips else super().call

    def header_facts(self) -> dict[str, str | None]:
        """Return what modelspec says of this model, by its names."""
        native = (self.source.sizes["unet"].get("sample_size") or self.native) * self.vae.factor
        width, height = self.cfg.data.resolution or (native, native)
        return {"architecture": self.modelspec, "resolution": f"{width}x{height}", **super().header_facts()}


class OneEncoderFamily(UNetFamily):
    """A UNet that is told nothing but the states of one text encoder, behind its last norm."""

    own_skip = 1
    # what StableDiffusionPipeline may have and this trainer does not
    index = MappingProxyType({
        "feature_extractor": [None, None], "image_encoder": [None, None], "requires_safety_checker": False,
        "safety_checker": [None, None],
    })  # fmt: skip
    agree = (
        Agree("unet.cross_attention_dim", lambda s: s["text_encoder"]["hidden_size"], "the text encoder's width"),
        *LATENT_CHANNELS,
    )

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        # kohya's name for the kind of model: sd_v1, sd_v2_v
        if cfg.model.prediction_type == "v_prediction":
            self.kohya_name = f"{type(self).kohya_name}_v"

    def read_state(self, text: Text) -> int | Literal["last"]:
        """Return which state is read: the norm stands behind any of them, and the output is the last one's."""
        return "last" if self.clip_skip == 1 else -self.clip_skip

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return the states of the text encoder, or the ids for one that is trained."""
        return made

    def unet_conditions(self, conditions: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the states of the text encoder, and nothing beside them."""
        return conditions["hidden_1"], None


# --- A UNet as a row of its down, mid and up blocks: residuals of the way down go along until the way up takes them


_SAMPLE, _EMB, _HIDDEN, _SKIP = "sample", "emb", "hidden", "skip."


class UNetChain:
    """The blocks of a UNet (see contracts.Chain), as UNet2DConditionModel.forward runs them. Layout: the latents' (h, w)."""

    def __init__(self, root: Any, family: UNetFamily) -> None:
        self._root, self._family = root, family
        unet = root.denoiser
        self._blocks = [f"down_blocks.{i}" for i in range(len(unet.down_blocks))] + ["mid_block"]
        self._blocks += [f"up_blocks.{i}" for i in range(len(unet.up_blocks))]
        self._pushes = [len(block.resnets) + len(block.downsamplers or []) for block in unet.down_blocks]
        self._takes = [len(block.resnets) for block in unet.up_blocks]
        self.units = [f"{root.part}.{name}" for name in self._blocks]
        self.owner = Owners(root, self.units, r"conv_norm_out\b|conv_out\b")

    def kind(self, batch: Batch) -> Any:
        """Say nothing beside the shapes."""
        return None

    def enter(self, inputs: Inputs) -> tuple[Carry, tuple[int, int]]:
        """Run the text encoders that are trained, the embedding of the time and the first convolution."""
        root, unet = self._root, self._root.denoiser
        hidden, added = self._family.unet_conditions(root.text(inputs.conditions))
        emb = unet.time_embedding(unet.get_time_embed(sample=inputs.x_t, timestep=inputs.timestep))
        extra = unet.get_aug_embed(emb=emb, encoder_hidden_states=hidden, added_cond_kwargs=added)
        emb = emb if extra is None else emb + extra
        sample = unet.conv_in(inputs.x_t)
        height, width = inputs.x_t.shape[-2:]
        return {_SAMPLE: sample, _EMB: emb, _HIDDEN: hidden, f"{_SKIP}0": sample}, (height, width)

    def names(self, layout: tuple[int, int], number: int) -> list[str]:
        """Name what arrives at unit `number`."""
        downs = len(self._pushes)
        kept = 1 + sum(self._pushes[: min(number, downs)]) - sum(self._takes[: max(0, number - downs - 1)])
        return [_SAMPLE, _EMB, _HIDDEN, *(f"{_SKIP}{i}" for i in range(kept))]

    def unit(self, number: int, carry: Carry, layout: tuple[int, int]) -> Carry:
        """Run block `number`, counted from 0."""
        unet, level = self._root.denoiser, number - len(self._pushes) - 1
        block = unet.get_submodule(self._blocks[number])
        sample, emb, hidden = carry[_SAMPLE], carry[_EMB], carry[_HIDDEN]
        skips = [carry[f"{_SKIP}{i}"] for i in range(len(carry) - 3)]
        cross = {"encoder_hidden_states": hidden} if getattr(block, "has_cross_attention", False) else {}
        if level < -1:
            sample, residuals = block(hidden_states=sample, temb=emb, **cross)
            skips += residuals
        elif level == -1:
            sample = block(sample, emb, **cross)
        else:
            taken, skips = skips[-self._takes[level] :], skips[: -self._takes[level]]
            # sides that do not halve evenly are brought back to the residual's own
            odd = any(side % 2**unet.num_upsamplers for side in layout)
            size = tuple(skips[-1].shape[2:]) if odd and level < len(self._takes) - 1 else None
            sample = block(
                hidden_states=sample, temb=emb, res_hidden_states_tuple=tuple(taken), upsample_size=size, **cross
            )
        return {_SAMPLE: sample, _EMB: emb, _HIDDEN: hidden, **{f"{_SKIP}{i}": skip for i, skip in enumerate(skips)}}

    def leave(self, carry: Carry, layout: tuple[int, int]) -> tuple[Tensor, ...]:
        """Turn what left the last block into noise or velocity."""
        unet = self._root.denoiser
        return (unet.conv_out(unet.conv_act(unet.conv_norm_out(carry[_SAMPLE]))),)


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
    remedy = f"1 for the embeddings, {n} input, {_MIDDLE} middle, {n} output, 1 for the output"
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
