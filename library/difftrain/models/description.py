"""What a family is made of, and what follows from that before a module is filled: sizes, latents, draws, tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.adapters import chosen_layers, is_adapter, put_in
from difftrain.config.schema.rates import part_rates
from difftrain.config.spellings.spelling import option
from difftrain.contracts import (
    ConfigFault,
    DrawSpec,
    Fault,
    Feature,
    FeatureSpec,
    Parts,
    ReferenceArea,
)
from difftrain.device.quantised import widened
from difftrain.models import build as known
from difftrain.models import passes, routing
from difftrain.models.build import possible
from difftrain.models.facts import Agree, Bound, Expert, FamilyOption, Lora, OneFile, Shift, Sizes, Text
from difftrain.models.objective import flow
from difftrain.models.registry import FAMILIES
from difftrain.models.row import CLIP_TARGETS, FamilyRow
from difftrain.models.text.encode import features_of
from difftrain.models.text.see import IMAGE, Sight, processor_of
from difftrain.models.text.tokenize import MAX_BUILT_IN, Tokenize, vocabularies
from difftrain.models.vae.latents import DROPOUT, MOMENTS, Latents
from difftrain.models.weights import keys
from difftrain.models.weights.bounds import size_faults
from difftrain.models.weights.fingerprints import Stamp
from difftrain.models.weights.keys import KeyMap, Rule, table_rule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.weights.source import WeightSource

# (part, dtype) -> the file that an export of this run wrote, and what it was then
Written = dict[tuple[str, torch.dtype], tuple[Path, Stamp]]


class Description:
    """What a family is made of: its facts, and what follows from them and the configuration without a weight.

    Facts: texts, blocks (lists of the denoiser, in order), patch (latent pixels along a token's side), fills_to (image tokens
    are filled up to multiples of it), shift, keys (the
    table of the original layout), infer (its sizes from shapes), agree, zero and unread (patterns of the denoiser's
    parameters that begin as zeros, and that no loss reaches; {last} is the last block), silent (pattern of those that are
    trained though no output depends on them: their gradient is zeros), keep_wide (pattern of the denoiser's layers that are
    never stored in few bits), leaving (pattern of those that are used behind the last block), lora, options, vae_scales (of a
    VAE in a single file; None: those of the model that it is for), folders (part -> folder where they differ),
    beside_sizes (what a file of sizes may say beside its sections), index (more of model_index.json), modelspec and
    kohya_name (what headers call it), needed (sizes of a part that have to be said), counts (sizes that count positions,
    where other classes say a side of them), one_file (of all parts in the
    original layout), as_trained (folder of an export with the
    denoiser as it is trained, where the export's is another).
    sequence: names of the modules that attend over image tokens alone, which ranks may share; then there is `timed`.
    named_hashes: fingerprints are of weights under their names in a folder; the shipped VAE is for its very sizes.
    latent_scale: the deviation of latents that the denoiser was made for.
    widens_text: the denoiser is given fp32 of what encoders made, whatever they were kept in.
    draws_trained_size: a prompt without a size is drawn in that of the training.
    processor: folder with what an encoder that sees does to images. frames_encoder: the part that sees the frames which the
    denoiser is shown (row.shown_frames of them), where one does; frame_alone: the VAE encodes such a frame by itself. experts: by name, of a model that has several denoisers.
    """

    name: str
    texts: tuple[Text, ...] = ()
    blocks: tuple[str, ...] = ()
    patch: int = 2
    fills_to: int = 1
    shift: Shift = Shift()
    keys: str = ""
    infer: Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any]] | None = None
    agree: tuple[Agree | Bound, ...] = ()
    zero: str = ""
    unread: str = ""
    silent: str = ""
    keep_wide: str = ""
    leaving: str = r"norm_out\b|proj_out\b"
    sequence: tuple[str, ...] = ()
    lora: Lora = Lora()
    options: tuple[FamilyOption, ...] = ()
    vae_scales: Mapping[str, Any] | None = MappingProxyType({})
    folders: Mapping[str, str] = {}
    beside_sizes: tuple[str, ...] = ()
    index: Mapping[str, Any] = {}
    modelspec: str = ""
    as_trained: str = ""
    kohya_name: str = ""
    needed: Mapping[str, tuple[str, ...]] = {}
    counts: tuple[str, ...] = ()
    one_file: OneFile | None = None
    named_hashes: bool = False
    latent_scale: float = 1.0
    widens_text: bool = True
    draws_trained_size: bool = True
    processor: str = "processor"
    frames_encoder: str = ""
    frame_alone: bool = False
    experts: Mapping[str, Expert] = {}

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg = cfg
        if any(text.picture for text in self.texts):
            self.texts = tuple(text.showing(self.num_control) for text in self.texts)
        self.written: Written = {}  # what exports of this run wrote of frozen parts
        self.key_maps: dict[str, KeyMap] = {}  # of the parts that exports have asked for
        self.exports_told: set[str] = set()  # what exports of this run have said already

    # ------------------------------------------------------------------ what it is made of

    @property
    def row(self) -> FamilyRow:
        """What is known of it before torch is imported."""
        return FAMILIES[self.name]

    @property
    def parts(self) -> Mapping[str, str]:
        """Map each part to its class; the first is the denoiser."""
        return self.row.parts

    @property
    def denoiser(self) -> str:
        """Name the part that is trained."""
        return next(iter(self.parts))

    def folder(self, part: str) -> str:
        """Return a part's folder in diffusers' layout, which is its section in a file of sizes."""
        if self.expert is not None and part == self.denoiser:
            return self.expert.folder
        return self.folders.get(part, part)

    @property
    def expert(self) -> Expert | None:
        """Say which of several denoisers is trained; None: there is one."""
        return self.experts.get(self.cfg.model.expert) if self.experts else None

    @cached_property
    def rates(self) -> Mapping[str, float]:
        """Map the parts that are trained to their rates."""
        return part_rates(self.cfg)

    @cached_property
    def in_root(self) -> tuple[str, ...]:
        """Name the parts that the root holds: the denoiser, and the text encoders that are trained with it."""
        return (self.denoiser, *dict.fromkeys(text.part for text in self.texts if text.part in self.rates))

    def where(self, field: str) -> str:
        """Return what messages call a field of [model]."""
        return option(f"model.{field}")

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout; None: by their names."""
        if part == self.denoiser and self.keys:
            return lambda module: table_rule(
                self.keys, {name: tuple(value.shape) for name, value in module.state_dict().items()}
            )
        return keys.vae_rule if self.parts[part] == "diffusers:AutoencoderKL" else None

    @cached_property
    def source(self) -> WeightSource:
        """Return the weights that the configuration names: BaseFamily finds them."""
        raise NotImplementedError

    def misfits(self, sizes: Sizes, where: str) -> list[Fault]:
        """Name everything that does not fit together, before a weight is read. where: the sizes come from."""
        problems = []
        for part, section in sizes.items():
            problems += self.wrong_sizes(part, section, f"{where} [{self.folder(part)}]")
        if problems:
            return problems
        complete = {part: known.complete(self.parts[part], section) for part, section in sizes.items()}
        for row in self.agree:
            with possible(row.where):
                misfit = row.misfit(complete)
            if misfit:
                part, _, argument = row.where.partition(".")
                problems.append(Fault(f"{where} [{self.folder(part)}] {argument}", *misfit[1:]))
        return problems

    def wrong_sizes(self, part: str, section: Mapping[str, Any], where: str) -> list[Fault]:
        """Find sizes of a part that have to be said and are not, and counts that are none. where: of the section."""
        needed = [*known.needed(self.parts[part]), *self.needed.get(part, ())]
        problems = [Fault(where, f"{key!r} is missing") for key in needed if section.get(key) is None]
        problems += size_faults(section, known.complete(self.parts[part], {}), where, self.counts)
        named = {fault.where for fault in problems}
        for key in needed:
            if f"{where} {key}" in named:
                continue
            value = section.get(key)
            no_count = value is None or key in known.NO_COUNTS or key.endswith(("_type", "_types"))
            if not no_count and not isinstance(value, list | tuple) and (type(value) is not int or value < 1):
                problems.append(Fault(f"{where} {key}", f"is {value!r}, must be a positive whole number"))
        return problems

    @cached_property
    def vae(self) -> Latents:
        """Say how raw latents and latents hang together."""

        def stored(name: str) -> Tensor:
            reader = self.source.readers.get("vae")
            if reader is not None:
                return reader.tensor(name)
            drawn = dict(widened(self.source.weights("vae", self.source.build("vae"))))
            return drawn[name]

        return Latents(self.parts["vae"], self.source.complete("vae"), stored, self.latent_scale)

    @property
    def features(self) -> FeatureSpec:
        """Say what is needed of the data: raw latents, and the draws."""
        vae = self.vae
        drawn = DrawSpec("normal", channels=vae.channels, factor=vae.factor, frames=vae.frames)
        raw = Feature(vae.raw_channels, vae.raw_factor, frames=vae.frames)
        draws = self.draws(drawn)
        if self.cfg.cache.latents_as == "moments":
            draws[MOMENTS] = DrawSpec("normal", channels=raw.channels, factor=raw.factor, frames=raw.frames)
        if self.cfg.data.control_dropout and self.num_control:
            draws[DROPOUT] = DrawSpec("uniform", trains=True)
        if self.cfg.model.first_frame_conditioning_p:
            draws[flow.FIRST_FRAME] = DrawSpec("uniform", trains=True)
        return FeatureSpec({"latents": raw}, draws | routing.draws(self.cfg, self.token), self.token)

    @property
    def num_control(self) -> int:
        """Reference images that a sample has."""
        return max(self.row.control_least, self.cfg.data.num_control) if self.row.control else 0

    @property
    def control_area(self) -> ReferenceArea | None:
        """Say which size reference images have; None: their image's."""
        return self.row.control_area if self.cfg.data.control_size == "area" else None

    @property
    def control_feature(self) -> Feature:
        """Describe the raw latents of one reference image."""
        vae = self.vae
        return Feature(vae.raw_channels, vae.raw_factor, frames=vae.frames, own=self.control_area)

    @property
    def token(self) -> int:
        """Pixels along a token's side, of which both sides of a picture are multiples."""
        return self.vae.factor * self.patch

    def image_tokens(self, rows: int, columns: int) -> int:
        """Count the tokens that an image of so many has in blocks, with what fills it up."""
        return -(-rows * columns // self.fills_to) * self.fills_to

    @property
    def small_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return three small images, (rows, columns) in tokens, of different numbers of them in blocks."""
        wider = max(1, self.fills_to // 2)
        return (2, 2 * wider), (2, 3 * wider), (2, 4 * wider)

    def draws(self, latent: DrawSpec) -> dict[str, DrawSpec]:
        """Return the host draws of the objective."""
        time = flow.time_of(self.cfg.flow, self.token, self.shift, self.vae.frames)
        if (expert := self.expert) is not None:
            time = replace(time, min_t=max(time.min_t, expert.low), max_t=min(time.max_t, expert.high))
        return flow.draws(latent, time)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each text encoder's output keeps."""
        return tuple(self._length(text) for text in self.texts)

    def _length(self, text: Text) -> int:
        if text.kind == "clip":
            return min(text.length, int(self.source.complete(text.part).get("max_position_embeddings", text.length)))
        if text.kind == "llm":
            return self.cfg.model.llm_max_length or text.length
        return self.cfg.model.t5_max_length if "model.t5_max_length" in self.row.takes else text.length

    @cached_property
    def sights(self) -> tuple[Sight | None, ...]:
        """Say of every text encoder how it sees reference images; None: it sees none. Raises ConfigFault."""
        return tuple(self._sight(text) if text.picture else None for text in self.texts)

    def _sight(self, text: Text) -> Sight:
        root = Path(self.cfg.model.pretrained).expanduser() if self.cfg.model.pretrained else None
        folder = root / self.processor if root is not None else None
        stored = processor_of(folder) if folder is not None else {}
        try:
            sight = Sight.of(text.area, self.num_control, self.source.complete(text.part), stored)
        except ValueError as error:
            raise ConfigFault([Fault(str(folder), str(error))]) from None
        return replace(sight, own=self.control_area)

    def sight_faults(self) -> list[Fault]:
        """Find what does not go with encoders that see reference images."""
        problems = []
        for position, text in enumerate(self.texts, start=1):
            if not text.picture:
                continue
            # what is cached is what it makes of an image that it has seen
            cached = next((name for name in ("text", "text_to_disk") if getattr(self.cfg.cache, name)), None)
            if self.cfg.data.control_dropout and cached:
                what = f"contradicts {option(f'cache.{cached}', True)}: {text.part} sees the reference, and what it makes of it is kept"
                problems.append(Fault(option("data.control_dropout"), what, "give one of them"))
            # the template up to its last image has to be read
            ahead = self.vocabularies[position - 1].backend().encode(text.template.partition("{}")[0]).ids
            if (least := len(ahead) - text.drop) > self.lengths[position - 1]:
                what = f"is {self.lengths[position - 1]}, the template takes {least} tokens before a caption begins"
                problems.append(Fault(option("model.llm_max_length"), what, "give more"))
            sight = self.sights[position - 1]
            mark = self.vocabularies[position - 1].backend().token_to_id(IMAGE)
            if sight is not None and mark != sight.mark:
                what = f"is {sight.mark}, and {mark} in {option(f'model.tokenizer{position}')} ({IMAGE})"
                problems.append(Fault(f"[{text.part}] image_token_id", what))
        return problems

    def text_features(self, position: int, dtype: str) -> dict[str, Feature]:
        """Describe what a text encoder makes. dtype: of hidden states and vectors."""
        sizes = self.source.complete(self.texts[position - 1].part)
        sight = self.sights[position - 1]
        return features_of(self.texts, position, self.lengths[position - 1], sizes, dtype, sight)

    @cached_property
    def vocabularies(self) -> tuple[Any, ...]:
        """Read the vocabulary of every text encoder. Raises ConfigFault."""
        sizes = {text.part: self.source.complete(text.part) for text in self.texts}
        return vocabularies(self.texts, self.source.tokenizer_dirs, sizes, self.row.title)

    def missing_tokenizers(self) -> dict[str, str]:
        """Return the vocabularies that the weights lack and a hub has: field -> id. Raises ConfigFault."""
        source = self.source
        return {
            f"model.tokenizer{position}": text.hub
            for position, text in enumerate(self.texts, start=1)
            if text.hub and text.tokenizer not in source.tokenizer_dirs
            if source.complete(text.part).get("vocab_size", 0) > MAX_BUILT_IN
        }

    def tokenizer_class(self, text: Text, vocabulary: Any) -> str:
        """Name the class of transformers that a text encoder's vocabulary is exported for."""
        return str(vocabulary.tokenizer_class)

    def built_in(self) -> list[str]:
        """Say which stored text encoders are read with a vocabulary of ours, because their folder has none."""
        lacks = [
            t for t in self.texts if t.part in self.source.readers and t.tokenizer not in self.source.tokenizer_dirs
        ]
        return [f"{t.tokenizer}: not found; difftrain's small built-in vocabulary is used for {t.part}" for t in lacks]

    def tokenizer(self, parts: Parts) -> Tokenize:
        """Return the picklable function from captions to token ids. Raises ConfigFault."""
        return Tokenize(self.texts, self.vocabularies, self.lengths)

    def negatives(self, parts: Parts) -> Tokenize:
        """Return the function from negative prompts to token ids: some are read without what stands around captions."""
        if not any(text.bare for text in self.texts):
            return self.tokenizer(parts)
        texts = [replace(text, template=text.bare or text.template) for text in self.texts]
        return Tokenize(texts, self.vocabularies, self.lengths)

    def is_base(self, part: str, name: str) -> bool:
        """Tell whether a parameter of a part of the root is only held, as its source has it.

        With adapters that is all of the network's own; `train_only` names those of the denoiser that are not.
        """
        if self.cfg.adapter.type is not None:
            return part in self.in_root and not is_adapter(name)
        patterns = self.cfg.model.train_only if part == self.denoiser else ()
        return bool(patterns) and not any(re.search(pattern, name) for pattern in patterns)

    def adapter_layers(self, part: str, net: nn.Module) -> list[str]:
        """Name the layers of a part of the root that get an adapter. net: as it is without any."""
        section = self.cfg.adapter
        if section.type is None or part not in self.rates:
            return []
        if part != self.denoiser:
            text = next(text for text in self.texts if text.part == part)
            return chosen_layers(net, section, CLIP_TARGETS, (), unread_text(text, net))
        return chosen_layers(net, section, self.lora.targets, self.blocks, self.unread_weights(net))

    def unread_weights(self, net: nn.Module) -> list[str]:
        """Name the denoiser's weights that no loss reaches, or no output depends on."""
        last = sum(1 for _ in passes.blocks_of(self, net)) - 1 if self.blocks else 0
        patterns = [re.compile(text.replace("{last}", str(last))) for text in (self.unread, self.silent) if text]
        return [name for name, _ in net.named_parameters() if any(pattern.search(name) for pattern in patterns)]

    def put_adapters(self, part: str, net: nn.Module) -> None:
        """Put adapters into a part of the root that has no weights yet."""
        autocast = self.cfg.training.mixed_precision != "no"
        put_in(net, self.cfg.adapter, self.adapter_layers(part, net), autocast=autocast)

    def reader(self, text: Text) -> str:
        """Name who decides which states of an encoder are read, for messages."""
        return self.row.title

    def largest_side(self) -> int | None:
        """Return the longest side in pixels that there are positions for; None: positions have no end."""
        return None


def unread_text(text: Text, encoder: Any) -> list[str]:
    """Name the parameters of a CLIP encoder that can get no gradient: what comes after the states that are read.

    There are none where a vector is read too: it goes through every layer.
    """
    if text.pooled or not isinstance(text.hidden, int) or text.hidden >= 0:
        return []
    layers = encoder.config.num_hidden_layers
    unused = tuple(f"encoder.layers.{i}." for i in range(layers + text.hidden + 1, layers))
    unused += () if text.normed else ("final_layer_norm.",)
    return [name for name, _ in encoder.named_parameters() if name.removeprefix("text_model.").startswith(unused)]
