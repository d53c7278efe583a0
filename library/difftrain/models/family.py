"""Any family that is described by facts, as a Family: what a family adds is its facts and its pass.

1. `load` builds the parts: the denoiser in the root, the rest frozen.
2. `encoders` describes what may be cached of a picture and its caption, and by which settings.
3. A step is BaseFamily's: `inputs`, `forward` through `enter`, `block` and `leave`, `loss_sums`.
4. `export`, `stream`, `drawer` and `flops_per_sample` follow from the same facts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from difftrain.adapters import NormBound, adapted_layers, by_factor, initial_values, inside_name
from difftrain.config.schema.rates import second_factor_ratio
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.spelling import option
from difftrain.contracts import (
    CAPTION,
    EDIT,
    Bucket,
    Chain,
    ConfigFault,
    Encoder,
    Feature,
    Group,
    Inputs,
    Parts,
    RunFacts,
    control_name,
)
from difftrain.device.quantised import Stored
from difftrain.models import base_weights, passes, placeholder, shown_frames, speedups, stages, vision
from difftrain.models.adapted import (
    adapter_notes,
    existing_adapter,
    existing_values,
    export_adapter,
    fuse,
    fused_fingerprints,
)
from difftrain.models.base import BaseFamily
from difftrain.models.drawer import FamilyDrawer
from difftrain.models.placeholder import DTYPES, fill, hollow_dtype, in_8_bits, to_8_bits, untrained
from difftrain.models.root import DenoiserRoot
from difftrain.models.text.encode import encode, inputs_of
from difftrain.models.text.tokenize import mask_name
from difftrain.models.vae.latents import control_encoder, latents_encoder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.weights.adapter_files import Adapter

Made = TypeVar("Made")


class ModelFamily(BaseFamily):
    """What a trainer asks of a family: each answer is a module of this room over BaseFamily."""

    def load(self, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
        """Build root and frozen parts; names and shapes only where meta. Raises ConfigFault.

        deferred: frozen parts that a placeholder counts for until they are loaded, also beside others without weights; with
        "root" the denoiser's weights are read by Parts.load_root, once the encoders have filled the caches.
        """
        return load(self, meta=meta, deferred=deferred)

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Describe what may be cached: latents, those of references, every frozen text encoder, an image encoder to align with."""
        raw = Feature(self.vae.raw_channels, self.vae.raw_factor, frames=self.vae.frames)
        fingerprint = partial(self.fingerprint, "vae")
        dtype = self.storage_dtype("vae")
        made = {"latents": latents_encoder(self.cfg, parts, raw, dtype, fingerprint)}
        for number in range(self.num_control):
            name = f"{control_name(number)}_latents"
            made[name] = control_encoder(self.cfg, parts, number, self.control_feature, dtype, fingerprint)
        for position, text in enumerate(self.texts, start=1):
            if text.part not in self.in_root:
                made[text.part] = self._text_encoder(parts, position)
        if self.row.shown_frames:
            made |= shown_frames.encoders(self, parts)
        if self.cfg.repa.encoder is not None:
            folder = vision.VisionFolder.at(self.cfg.repa.encoder)
            made[vision.PART] = vision.encoder(folder, parts.frozen, self.token, self.cfg.training.mixed_precision)
        return made

    def _text_encoder(self, parts: Parts, position: int) -> Encoder:
        """Describe one frozen text encoder; no module is looked at for it."""
        text = self.texts[position - 1]
        dtype = str(DTYPES[self.cfg.training.mixed_precision]).removeprefix("torch.")
        settings = self.text_settings(position)
        features, sight = self.text_features(position, dtype), self.sights[position - 1]
        return Encoder(
            source=CAPTION if sight is None else EDIT,
            features=features,
            modules=(text.part,),
            settings=settings,
            encode=lambda batch: encode(self.texts, position, parts.frozen[text.part], batch.features, sight),
            fingerprint=partial(self.fingerprint, text.part, settings),
            inputs=inputs_of(self.texts, position),
            masks={name: mask_name(self.texts, position) for name, feature in features.items() if feature.maskable},
            references=1 if sight is None else sight.count,
        )

    def rotary(self, size: Hashable, device: torch.device, make: Callable[[], Iterable[Tensor]]) -> tuple[Tensor, ...]:
        """Return rotary tables on a device, made once for a size.

        size: all that they hang on. make: makes them on the host where the network lets it, so equal on every device.
        """
        return self.once(("rotary", size, device), lambda: tuple(table.to(device) for table in make()))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Make something the first time that it is asked for, and keep it. key: what it is, and all that it hangs on."""
        if key not in self._made_once:
            self._made_once[key] = make()
        return self._made_once[key]

    @cached_property
    def _made_once(self) -> dict[Hashable, Any]:
        return {}

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks in the order in which they run."""
        return [
            (f"{self.denoiser}.{name}", block)
            for name, block in passes.blocks_of(self, parts.root.get_submodule(self.denoiser))
        ]

    def chain(self, root: nn.Module) -> Chain:
        """Return the pass of a root as a row of blocks, for a pipeline."""
        return stages.chain_of(root)

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the blocks that recur, for regional compile."""
        return [block for _, block in self.units(parts)]

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group what is trained, part by part, under the names that root gives it; what is no part's goes with the first.

        Second factors of an adapter that learn faster are a group of their own.
        """
        groups = {part: Group(part, [], rate) for part, rate in self.rates.items()}
        for name, param in root.named_parameters():
            if param.requires_grad:
                part = name.partition(".")[0]
                groups.get(part, groups.get(self.denoiser, next(iter(groups.values())))).named_params.append(
                    (name, param)
                )
        return [cut for part, group in groups.items() for cut in by_factor(group, second_factor_ratio(self.cfg, part))]

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count forward and backward of one sample (see flops.py)."""
        from difftrain.models.flops import flops_per_sample

        return flops_per_sample(self, bucket)

    def stream(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Give every weight of the configured model straight from its source: parts may be without any."""
        frozen = {part: module for part, module in parts.frozen.items() if part in self.parts}
        yield from placeholder.source_weights(
            self.source, {part: parts.root.get_submodule(part) for part in self.in_root} | frozen
        )

    def export(
        self,
        weights: Iterable[tuple[str, Tensor]],
        parts: Parts,
        layout: str,
        path: Path,
        *,
        dtype: torch.dtype | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Path:
        """Write weights for inference; what the stream lacks comes from parts, or from its source where it is deferred."""
        if self.cfg.adapter.type is not None:
            return export_adapter(self, weights, parts, path, dtype=dtype, metadata=metadata or {})
        from difftrain.models.export import export

        return export(self, weights, parts, layout, path, dtype=dtype, metadata=metadata or {})

    def drawer(self, parts: Parts, predict: Callable[[Inputs], Tensor] | None = None) -> FamilyDrawer:
        """Return what draws with the very modules of parts, as training sees captions and pictures.

        predict: calls the denoiser, where the root is in pieces on several ranks.
        """
        return FamilyDrawer(self, parts, predict)

    def metadata(self, title: str, saved_at: float, facts: RunFacts | None = None) -> dict[str, str]:
        """Return modelspec.* and, of a run, ss_* for the header of an export."""
        from difftrain.models.metadata import described, kohya_keys

        made = described(self.cfg, title, saved_at, self.header_facts())
        if facts is not None:
            made |= kohya_keys(self.cfg, facts, saved_at, self.kohya_name or self.name, self.objective_facts())
        return {name: redact_text(value) for name, value in made.items()}  # weights are handed on


# --- The parts of a family in memory: what is trained in the root, the rest frozen, or described and loaded later
# 1. All parts that are needed now are built hollow and compared with the source: every misfit is named at once.
# 2. The root is filled, or waits for the caches to be built (Parts.load_root): encoders and root are never both in memory.
# 3. Frozen parts are filled, or stand as placeholders until they are loaded.


_TITLES = {"unet": "UNet"}


def load(family: ModelFamily, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
    """Build root and frozen parts; names and shapes only where meta. Raises ConfigFault.

    deferred: frozen parts that a placeholder counts for until they are loaded, also beside others without weights; with
    "root" the denoiser's weights are read by Parts.load_root, once the encoders have filled the caches.
    """
    cfg, source, inside = family.cfg, family.source, family.in_root
    frozen = [part for part in family.parts if part not in inside]
    waiting = [part for part in frozen if part in deferred]
    modules = {part: source.build(part) for part in family.parts if part not in waiting}
    net = modules[family.denoiser]
    problems = [*source.faults(modules), *family.faults(net)]
    if problems:
        raise ConfigFault(problems)

    # --- the root: hollow until it is loaded
    plain = {part: source.build(part) if cfg.adapter.type else modules[part] for part in inside}  # as its source has it
    for part in inside if cfg.adapter.type else ():
        family.put_adapters(part, modules[part])
    for part in inside:
        hollow_dtype(modules[part], partial(family.storage_dtype, part))
    encoders = {part: modules[part] for part in inside[1:]}
    root = DenoiserRoot(family, family.denoiser, net, encoders=encoders, **family.root_options(net, meta=meta))
    parts = Parts(root)
    parts.notes += [*family.freeze(parts, root), *adapter_notes(family, root)]
    parts.notes += base_weights.quantise(family, parts)

    existing = cache(partial(existing_adapter, family))  # one file has the layers of all parts

    def load_root() -> None:
        base = frozenset(parts.base)
        for part in inside:
            # what is added to must be memory of its own
            mapped = lambda name, part=part: f"{part}.{name}" in base and not cfg.adapter.fuse_adapters  # noqa: E731
            weights = with_adapters(family, part, modules[part], source.weights(part, plain[part]), existing)
            fill(modules[part], weights, partial(family.storage_dtype, part), mapped=mapped)
        parts.notes += fuse(family, root)

    # frozen layers of the root are put into 8 bits below, where they have weights
    if "root" in deferred and not meta and cfg.model.fp8_frozen is None:
        parts.load_root = load_root
    elif not meta:
        load_root()

    # --- frozen parts
    for part in frozen:
        dtype = family.storage_dtype(part)
        if part in waiting:
            parts.frozen[part] = placeholder.make_placeholder(source, part, dtype)
            parts.deferred[part] = partial(
                placeholder.load_part, source, part, parts, dtype, eight_bits=in_8_bits(cfg, part)
            )
        else:
            placeholder.fill_part(source, part, modules[part], dtype, meta=meta)
            parts.frozen[part] = untrained(modules[part])
    parts.notes += _in_8_bits(family, parts)
    speedups.add_encoder(cfg, parts, meta=meta, deferred=deferred)

    if parts.base and not meta:
        kept = {name.partition(".")[0] for name in parts.base}
        parts.base_fingerprints = {part: source.fingerprint(part) for part in inside if part in kept}
        parts.base_fingerprints |= fused_fingerprints(cfg)

    if cfg.adapter.type and cfg.adapter.scale_weight_norms:
        parts.constrain = NormBound(root, cfg.adapter.scale_weight_norms)

    # --- what else is to be known
    parts.config = family.architecture()
    parts.notes += [*source.notes, *family.built_in(), *family.remarks()]
    if cfg.training.gradient_checkpointing:
        net.enable_gradient_checkpointing()
        for encoder in encoders.values():
            _recompute(encoder)
        if (count := cfg.training.checkpoint_blocks) is not None:
            passes.recompute_some([block for _, block in family.units(parts)], count)
    return parts


def with_adapters(
    family: BaseFamily, part: str, module: nn.Module, weights: Iterable[tuple[str, Tensor | Stored]],
    existing: Callable[[], Adapter],
) -> Iterator[tuple[str, Tensor | Stored]]:  # fmt: skip
    """Give the weights of a part under the names that they have beside adapters, and then those of the adapters.

    existing: reads the adapter that training goes on from.
    """
    section, layers = family.cfg.adapter, adapted_layers(module)
    if not layers:
        yield from weights
        return
    yield from ((inside_name(name, layers), value) for name, value in weights)
    if section.init_from_existing:
        yield from existing_values(family, part, module, existing())
    else:
        yield from initial_values(module, section, part, family.source.seed)


def _in_8_bits(family: BaseFamily, parts: Parts) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE or of the denoiser alone; return what is to be said."""
    which = family.cfg.model.fp8_frozen
    if which is None:
        return []
    chosen: dict[str, Any] = {family.denoiser: parts.root.get_submodule(family.denoiser)}
    chosen |= {name: module for name, module in parts.frozen.items() if in_8_bits(family.cfg, name)}
    notes = to_8_bits(chosen)
    if not notes:
        flag = option("model.fp8_frozen", "all") if which == "all" else option("model.fp8_frozen", "unet")
        return [f"{flag} has no effect: it is for frozen layers, and all of those layers are trained here"]
    return [f"in 8 bits, because they are frozen: {notes}; exports and checkpoints keep their original precision"]


def _recompute(encoder: Any) -> None:
    """Compute activations again in the backward pass."""
    newer = getattr(encoder, "activation_checkpointing_enable", None)  # its name since transformers 5
    (newer or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
