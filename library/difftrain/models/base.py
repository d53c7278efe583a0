"""The maths of a family and its rules, over the facts of Description: what the kit calls, and a family overrides.

1. `source` finds the weights; `faults` and `freeze` say what a configuration may train of them.
2. `inputs` makes a step's inputs of a batch: latents, conditions (cached or encoded now), noise, target and weight.
3. `forward` predicts, `loss_sums` sums the terms.
4. `folded`, `beside`, `model_index` and `card` say in what an export is not the module as it is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain import __version__
from difftrain.adapters import target_faults
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Fault, Inputs, Parts, control_name
from difftrain.models import passes, placeholder, shown_frames, speedups, vision
from difftrain.models.description import Description, unread_text
from difftrain.models.facts import Text
from difftrain.models.objective import flow
from difftrain.models.placeholder import DTYPES, in_8_bits
from difftrain.models.root import DenoiserRoot
from difftrain.models.text.encode import encode, inputs_of, outputs_of
from difftrain.models.text.see import PROCESSOR
from difftrain.models.text.tokenize import Tokenize, mask_name
from difftrain.models.vae.latents import DROPOUT, control_latents, raw_latents
from difftrain.models.weights.find import is_released, shipped_sizes, source_of
from difftrain.models.weights.fingerprints import hashed
from difftrain.models.weights.folder_export import WRITTEN_BY, snippet_head
from difftrain.models.weights.source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig


VERSION = 1  # raise it where equal weights, settings and inputs come to be encoded otherwise


class BaseFamily(Description):
    """A transformer that learns a rectified flow, but for what a family overrides; its facts are those of Description."""

    # ------------------------------------------------------------------ the maths of a family

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> passes.Tokens:
        """Make tokens. Shapes: x_t (B, C, [F,] H, W), t (B,) in 0..1000."""
        raise NotImplementedError

    def block(self, block: Any, tokens: passes.Tokens) -> passes.Tokens:
        """Run one block."""
        raise NotImplementedError

    def leave(self, net: Any, tokens: passes.Tokens) -> Tensor:
        """Return the velocity, as x_t."""
        raise NotImplementedError

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Turn what the text encoders made (hidden_1, pooled_2, ...) into what the denoiser takes, fp32: of one encoder tokens
        (B, L, J), and mask (B, L) where it is given which are a caption's. batch: None where a picture is drawn.
        """
        masks = {"mask": made[mask_name(self.texts, 1)]} if self.texts[0].passes_mask else {}
        return {"tokens": made["hidden_1"], **masks}

    def guided(self, conditions: dict[str, Tensor], guidance: float | None) -> dict[str, Tensor]:
        """Add the guidance that a distilled model is told while it draws; others are told none."""
        return conditions

    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor:
        """Go beyond the prediction with text, away from that without. Shapes: each (B, C, [F,] h, w).

        Ho and Salimans, Classifier-free diffusion guidance, 2022, equation 6, with scale = 1 + w.
        """
        return without + scale * (with_text - without)

    def without_text(self, conditions: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return what training put in the place of dropped texts, shaped as these conditions; None: the encoded empty text."""
        return None

    def without_references(self, shown: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn the references of conditions into those of the prediction that guidance starts from: they are in both."""
        return shown

    def size_features(self, size_hw: tuple[int, int], count: int) -> dict[str, Tensor]:
        """Return features of a picture's size that conditions are made of, (B, ...), where a picture is drawn."""
        return {}

    def denoise(
        self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor], plan: passes.PassPlan
    ) -> passes.PassOutputs:
        """Run the denoiser; a network without a list of blocks overrides it."""
        return passes.run(self, net, x_t, t, conditions, plan)

    # ------------------------------------------------------------------ loading

    @cached_property
    def source(self) -> WeightSource:
        """Find the weights that the configuration names. Raises ConfigFault."""
        return source_of(self.cfg, self, self.drawn_sizes)

    def drawn_sizes(self) -> dict[str, Any]:
        """Return the sizes of parts that may be stored nowhere: a section each, by its folder. Raises ConfigFault."""
        choice = self.cfg.model.init_from_config
        return shipped_sizes(self, choice) if choice else {}

    def storage_dtype(self, part: str, name: str = "") -> torch.dtype:
        """Return the dtype that a part's weights are kept in; name: of a parameter, where a part is held in part."""
        half = DTYPES[self.cfg.training.mixed_precision]
        if part in self.in_root:
            return half if name and self.is_base(part, name) else torch.float32
        return torch.float32 if part == "vae" and self.cfg.model.vae_fp32 else half

    def faults(self, net: nn.Module) -> list[Fault]:
        """Find what a configuration asks of this denoiser and it has not. net: without weights."""
        return faults(self, net)

    def freeze(self, parts: Parts, root: DenoiserRoot) -> list[str]:
        """Freeze what no loss reaches, what is only held and what has no rate; return what is to be said of it."""
        return freeze(self, parts, root)

    def remarks(self) -> list[str]:
        """Return more sentences to print at start."""
        return [] if self.expert is None else [self.expert.about()]

    def architecture(self) -> dict[str, Any]:
        """Return the sizes of all parts, as --init_from_config=FILE.json takes them."""
        sections = {self.folder(part): dict(self.source.sizes[part]) for part in self.parts}
        init = {"init": self.source.init} if self.zero else {}
        return {"family": self.name, "name": self.source.name, **init} | sections

    def stored_fields(self) -> dict[str, Any]:
        """Return fields of the configuration that weights say of themselves, for drawing with others' weights."""
        return {}

    def root_options(self, net: nn.Module, *, meta: bool) -> dict[str, Any]:
        """Return what the root is made with beside its denoiser."""
        loss = self.cfg.loss
        target = loss.text_recon_target_layer if loss.text_recon_gamma else None
        return {"target_layer": target, **speedups.of_root(self, net, meta=meta)}

    # ------------------------------------------------------------------ frozen encoders

    def text_settings(self, position: int) -> str:
        """Say all that decides what a text encoder makes of a caption, weights aside, for its fingerprint."""
        text = self.texts[position - 1]
        tokens = Tokenize(self.texts, self.vocabularies, self.lengths).describe(position)
        layers = f"layers {text.layers}" if text.layers else f"state {text.hidden}"
        reading = f"{layers}, {text.pooled}" + (f", without the first {text.drop}" if text.drop else "")
        reading += f", {sight.describe()}" if (sight := self.sights[position - 1]) is not None else ""
        return f"{self.precision(text.part)}, {tokens}, {reading}"

    def precision(self, part: str) -> str:
        """Say in which precision a frozen part computes, for its fingerprint."""
        return f"precision {self.cfg.training.mixed_precision}{' in 8 bits' if in_8_bits(self.cfg, part) else ''}"

    def fingerprint(self, part: str, settings: str) -> str:
        """Hash what a part is asked to make, its sizes, and its weights where they are stored."""
        return hashed(
            VERSION, settings, part, sorted(self.source.decisive(part).items()), self.source.fingerprint(part)
        )

    # ------------------------------------------------------------------ a step

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Sample the VAE's posterior with the draw "moments", or take its mean; scaled for the denoiser."""
        return self.vae.scaled(raw_latents(self.cfg, batch, parts))

    def references(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return the latents of the reference images of a batch as conditions, (B, C, h, w) each; zeros where they are dropped."""
        made, shown = {}, self.shown(batch)
        for number in range(self.num_control):
            latents = self.vae.scaled(control_latents(self.cfg, batch, parts, number))
            if shown is not None:
                latents = latents * shown.to(latents).view(-1, *(1,) * (latents.ndim - 1))
            made[control_name(number)] = latents
        return made

    def frames(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return the frames of a clip that the denoiser is shown, as conditions."""
        return shown_frames.of_batch(self, batch, parts) if self.row.shown_frames else {}

    def shown(self, batch: Batch) -> Tensor | None:
        """Tell of which samples the references are shown, (B,) bool; None: of all."""
        return batch.draws[DROPOUT] >= self.cfg.data.control_dropout if DROPOUT in batch.draws else None

    def text(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return conditions: what each text encoder made, from the cache or encoded now; of trained ones what they read."""
        made: dict[str, Tensor] = {}
        for position, text in enumerate(self.texts, start=1):
            outputs = outputs_of(self.texts, position)
            if outputs[0] in batch.features:
                made |= {name: batch.features[name] for name in outputs}
                mask = batch.features.get(mask_name(self.texts, position))
                made |= {} if mask is None else {mask_name(self.texts, position): mask}
            elif text.part in parts.frozen:
                how = self.sights[position - 1], self.shown(batch)
                made |= encode(self.texts, position, parts.frozen[text.part], batch.features, *how)
            else:
                read = inputs_of(self.texts, position)
                made |= {name: batch.features[name] for name in read if name in batch.features}
        masks = {mask_name(self.texts, position) for position in range(1, len(self.texts) + 1)}
        made = {name: value.bool() if name in masks else value for name, value in made.items()}
        if self.widens_text:
            made = {name: value.float() if value.is_floating_point() else value for name, value in made.items()}
        return self.conditions(made, batch)

    @torch.no_grad()
    def inputs(self, batch: Batch, parts: Parts) -> Inputs:
        """Encode, noise and weigh one micro batch, in fp32."""
        conditions = self.text(batch, parts) | self.references(batch, parts) | self.frames(batch, parts)
        made = self.noised(batch, self.latents(batch, parts), conditions)
        return speedups.applied(self, batch, parts, made)

    def noised(self, batch: Batch, latents: Tensor, conditions: dict[str, Tensor]) -> Inputs:
        """Noise latents as the objective does, and say what is to be predicted."""
        made = flow.inputs(batch, latents, conditions)
        return flow.with_first_frame(made, batch, latents, self.cfg.model.first_frame_conditioning_p)

    def forward(self, root: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
        """Predict the velocity, as x_t, and what further terms of the loss compare."""
        return root(inputs.x_t, inputs.timestep, inputs.conditions, align=speedups.aligns(inputs))

    def loss_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum over samples of weight times the sample's own mean loss, in fp32, a term each."""
        if self.cfg.repa.encoder is None:
            return self.term_sums(outputs, inputs)
        return speedups.with_alignment(self.cfg, self.term_sums(outputs[:-1], inputs), outputs[-1], inputs)

    def term_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum the terms of the objective."""
        velocity, *texts = outputs
        made = flow.loss_sums(self.cfg.loss, velocity, inputs)
        if not texts:
            return made
        last, target = texts
        return flow.with_text(self.cfg.loss, made, last, target, inputs)

    # ------------------------------------------------------------------ exports and pictures

    def deferred_weights(self, parts: Parts, without: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Give the weights of deferred parts as they would be if they were loaded; without: of which they are not wanted."""
        return placeholder.deferred_weights(self.source, parts, self.storage_dtype, {vision.PART, *without})

    def exported(self, part: str) -> nn.Module:
        """Build a part as exports hold it, without memory."""
        return self.source.build(part)

    def folded(self, name: str, value: Tensor) -> Tensor | None:
        """Turn a tensor of the denoiser as it is trained into an export's; None: exports have no such one."""
        return value

    def scheduler(self) -> Any:
        """Make the scheduler that samplers take their settings from, and that exports hold."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_config(
            flow.scheduler_config(self.cfg.flow, self.shift, self.source.scheduler)
        )

    @property
    def drawn_unit(self) -> int:
        """Pixels that both sides of a drawn picture are multiples of."""
        return self.token

    def facts(self) -> dict[str, Any]:
        """Return what diffusers' own files cannot say of an export, for difftrain.json."""
        return {"difftrain": __version__, "family": self.name}

    def model_index(self, classes: Mapping[str, Any]) -> dict[str, Any]:
        """Return what model_index.json says of the pipeline. classes: of all that lies in its folder."""
        return dict(sorted({**classes, **self.index}.items()))

    @property
    def writes_as_kohya(self) -> bool:
        """Tell whether exports are those of kohya's tools: `diffusers` is a folder of torch's .bin, every file of weights
        has the header of the run, and nothing lies beside what a pipeline reads.
        """
        return "ckpt" in self.row.layouts

    def write_beside(self, folder: Path) -> dict[str, list[str]]:
        """Write what else the pipeline of a folder has, and name the classes of it."""
        classes = shown_frames.write_beside(self, folder) if self.frames_encoder else {}
        for sight, vocabulary in zip(self.sights, self.vocabularies, strict=True):
            if sight is not None:
                vocabulary.save(folder / self.processor)
                (folder / self.processor / PROCESSOR).write_text(json.dumps(sight.stored(), indent=2), encoding="utf-8")
                classes[self.processor] = ["transformers", "Qwen2VLProcessor"]
        return classes

    def beside(self, parts: Parts) -> dict[str, Tensor]:
        """Return tensors of a single file that are no weights of a part, and that readers of it expect."""
        return {}

    def copies(self) -> Mapping[str, str]:
        """Map keys of a single file that nothing reads to those whose tensors stand there too."""
        return {}

    @property
    def is_released(self) -> bool:
        """Tell whether its sizes are those that every reader of single files knows by heart."""
        known = (self.one_file.released, *self.one_file.others) if self.one_file is not None else ()
        return any(is_released(self, size) for size in known)

    def card(self, dtype: str) -> str:
        """Write the page beside an export. dtype: "torch.float16", of its weights."""
        made = "images[0]" if self.row.tasks[0].endswith("to-image") else "frames[0][0]"
        head = snippet_head(self.row, dtype, reference=self.num_control + self.row.shown_frames > 0)
        return (
            f"# {self.row.title}\n\n{WRITTEN_BY} {__version__}.\n\n```python\n"
            f"{head}image = pipe({self.call}).{made}\n```\n"
        )

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'image=reference, prompt="make it red"' if self.num_control else '"a red cat"'

    # ------------------------------------------------------------------ headers of exports

    def header_facts(self) -> dict[str, str | None]:
        """Return what modelspec says of this model, by its names."""
        low, high = self.cfg.flow.min_t, self.cfg.flow.max_t
        first = next((dataset.resolution for dataset in self.cfg.data.datasets if dataset.resolution), None)
        size = self.cfg.data.resolution or first or self.native_size()
        return {
            "architecture": self.modelspec or self.name,
            "resolution": f"{size[0]}x{size[1]}" if size else None,
            "prediction_type": "velocity",
            "timestep_range": None if (low, high) == (0, 1) else f"{round(1000 * low)},{round(1000 * high)}",
        }

    def native_size(self) -> tuple[int, int] | None:
        """Return (width, height) in pixels that the model is made for, where its sizes say that."""
        return None

    def objective_facts(self) -> dict[str, Any]:
        """Return what a header says of the loss and the times, under kohya's names."""
        from difftrain.models.metadata import flow_facts

        return flow_facts(self.cfg, self.options)


# --- What a configuration trains of a model: what it asks and the model has not, and what stays frozen


_TITLES = {"unet": "UNet"}


def faults(family: Description, net: nn.Module) -> list[Fault]:
    """Find what a configuration asks of this denoiser and it has not. net: without weights."""
    nothing = Fault(option("optimizer.learning_rate"), "is 0 for every part: nothing would be trained")
    problems = [] if family.rates else [nothing]
    names = [name for name, _ in net.named_parameters()]
    for pattern in family.cfg.model.train_only:
        if not any(re.search(pattern, name) for name in names):
            remedy = f"a regular expression that finds some, such as {names[len(names) // 2]}"
            problems.append(
                Fault("[model] train_only", f"{pattern!r} finds no parameter of the {family.denoiser}", remedy)
            )
    if family.cfg.adapter.type is not None and family.denoiser in family.rates:
        layers = family.adapter_layers(family.denoiser, net)
        beside = [family.source.build(part) for part in family.in_root[1:]]
        others = [name for module in beside for name, _ in module.named_modules()]
        problems += target_faults(net, family.cfg.adapter, layers, family.denoiser, others)
    problems += family.sight_faults()
    layer, depth = family.cfg.loss.text_recon_target_layer, sum(1 for _ in passes.blocks_of(family, net))
    if layer and layer >= depth:  # its own tokens would be no target
        what = f"is {layer}, the {family.denoiser} has {depth} blocks"
        what += ": the text of the last block would be compared with itself" if layer == depth else ""
        remedy = f"0 for what enters the first block, or 1 to {depth - 1} for what leaves one before the last"
        problems.append(Fault(option("loss.text_recon_target_layer"), what, remedy))
    side, largest = max(_longest_sides(family.cfg), default=0), family.largest_side()
    if largest is not None and side > largest:
        what = f"makes buckets of {side} px, the {family.denoiser}'s positions end at {largest}"
        problems.append(Fault(option("data.resolution"), what, "choose a smaller one"))
    return problems + speedups.faults(family, net)


def _longest_sides(cfg: TrainConfig) -> list[int]:
    """Return the longest side that each data set's pictures can have, as far as the configuration says."""
    sides: list[int] = []
    section: Any
    evaluated = [dataset for evaluation in cfg.eval.sets for dataset in evaluation.datasets]
    for section in (cfg.data, *cfg.data.datasets, *evaluated):
        sides += [max(size) for size in section.sizes]
        if section.resolution and not section.sizes:
            sides.append(max(section.resolution))
            if section.enable_bucket:
                width, height = section.resolution
                sides.append(min(section.max_bucket_reso, width * height // section.min_bucket_reso))
    return sides


def freeze(family: Description, parts: Parts, root: DenoiserRoot) -> list[str]:
    """Freeze what no loss reaches, what is only held and what has no rate; return what is to be said of it."""
    net, notes = root.denoiser, []

    # --- what is only held
    for part in family.in_root:
        base = [name for name, _ in root.get_submodule(part).named_parameters() if family.is_base(part, name)]
        parts.base |= {f"{part}.{name}" for name in base}
        for name in base:
            root.get_submodule(part).get_parameter(name).requires_grad_(False)
        if base:
            frozen = sum(root.get_submodule(part).get_parameter(name).numel() for name in base)
            notes.append(f"kept as in their source, and in no checkpoint: {frozen:,} weights of the {part}")
    if family.cfg.adapter.type is not None:
        return notes

    # --- what no loss reaches
    last = sum(1 for _ in passes.blocks_of(family, net)) - 1 if family.blocks else 0
    unread = re.compile(family.unread.replace("{last}", str(last))) if family.unread else None
    silent = re.compile(family.silent.replace("{last}", str(last))) if family.silent else None
    for name, param in net.named_parameters():
        if unread and unread.search(name):
            param.requires_grad_(False)
        elif silent and silent.search(name) and param.requires_grad:
            parts.silent.add(f"{family.denoiser}.{name}")

    # --- what has no rate
    if family.denoiser not in family.rates:
        net.requires_grad_(False)
        notes.append(f"the {_TITLES.get(family.denoiser, family.denoiser)} is frozen: its learning rate is 0")
    for text in family.texts:
        if text.part in family.in_root:
            notes += _freeze_unread(text, root.get_submodule(text.part), family.reader(text))
    return notes


def _freeze_unread(text: Text, encoder: Any, reader: str) -> list[str]:
    """Freeze what no loss reaches; return the sentence that says so. reader: who reads the states before it."""
    names = unread_text(text, encoder)
    for name in names:
        encoder.get_parameter(name).requires_grad_(False)
    if not names or not isinstance(text.hidden, int):
        return []
    layers = encoder.config.num_hidden_layers
    first, last = layers + text.hidden + 1, layers - 1
    which = "" if first == layers else f"layer {first} and " if first == last else f"layers {first} to {last} and "
    return [
        f"{text.part}: {which}final_layer_norm ({len(names)} tensors) are not trained, "
        f"because {reader} reads the hidden states before them"
    ]
