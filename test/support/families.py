"""Families that stand on the kit, a tiny one of each with a batch, and diffusers' own way of saying what they say."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle

from difftrain.config import TrainConfig
from difftrain.contracts import CONTROL, Batch, Bucket, Draw, Inputs, Parts, image_feature
from difftrain.data.samples import host_draws
from difftrain.models import passes
from difftrain.models.family import ModelFamily
from difftrain.models.registry import FAMILIES, make_family

# rows whose class is not built from facts yet; a test fails where this is no longer so
NOT_ON_THE_KIT: set[str] = set()
T5_LENGTH = 16
CAPTIONS = ("a red cat on a table", "two dogs")


def class_of(name: str) -> type | None:
    """Import the class of a family; None where there is none yet."""
    module, _, attribute = FAMILIES[name].target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("difftrain."):
            return None
        raise


ON_KIT = tuple(name for name in FAMILIES if (made := class_of(name)) is not None and issubclass(made, ModelFamily))

# families of another's classes -> that other: what holds for it holds for them, and is looked at nightly where all are
SIBLINGS = {
    "sd2": "sd1",
    "flux2_klein": "flux2",
    "flux_kontext": "flux",
    "qwen_image_edit_plus": "qwen_image_edit",
    "wan_flf2v": "wan_i2v",
    "wan_2_2": "wan",
    "wan_2_2_i2v": "wan_i2v",
    "wan_2_2_5b": "wan",
    "cosmos_predict2_video": "cosmos_predict2",
    "hunyuan_video_15_i2v": "hunyuan_video_15",
}
# those whose operators are another's, too
SIBLINGS_ON_DEVICES = SIBLINGS | {
    "sd1": "sdxl",
    "chroma": "flux",
    "qwen_image_edit": "qwen_image",
    "wan": "cosmos_predict2",
    "wan_i2v": "cosmos_predict2",
    "ltx_video": "cosmos_predict2",
    "hunyuan_video": "hunyuan_image",
    "cosmos": "cosmos_predict2",
}


def nightly_siblings(names: Iterable[str], siblings: Mapping[str, str] = SIBLINGS) -> list[Any]:
    """Mark families nightly whose sibling is among the others."""
    names = tuple(names)
    return [pytest.param(name, marks=pytest.mark.nightly) if siblings.get(name) in names else name for name in names]


# ------------------------------------------------------------------ a tiny one


@dataclass
class Tiny:
    """A family of the size tiny with its modules, and two captioned pictures (or clips) of an odd shape."""

    family: ModelFamily
    parts: Parts
    batch: Batch

    @property
    def net(self) -> Any:
        """Return the denoiser."""
        return self.parts.root.get_submodule(self.family.denoiser)

    def inputs(self) -> Inputs:
        """Encode and noise the batch anew."""
        return self.family.inputs(self.batch, self.parts)

    def loss(self, inputs: Inputs | None = None) -> torch.Tensor:
        """Run a step as far as its loss, of the whole batch."""
        inputs = inputs or self.inputs()
        return self.family.loss_sums(self.family.forward(self.parts.root, inputs), inputs)["loss"]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what root holds, by plain names."""
        return dict(self.parts.root.state_dict())


def config(name: str, sections: Mapping[str, Any] | None = None, **model: Any) -> TrainConfig:
    """Return a configuration of the tiny size, with fields of [model] by keyword and other sections as tables."""
    if "pretrained" not in model:
        model = {"init_from_config": "tiny"} | model
    if "model.t5_max_length" in FAMILIES[name].takes:
        model = {"t5_max_length": T5_LENGTH} | model
    if name in ORACLES and (length := ORACLES[name].text_length) is not None:
        model = {"llm_max_length": length} | model
    base: dict[str, dict[str, Any]] = {"training": {"seed": 1}, "optimizer": {"learning_rate": 1e-3}}
    if name in ORACLES and (shown := ORACLES[name].num_control) is not None:
        base["data"] = {"num_control": shown}
    given = {"model": {"family": name} | model, **base}
    for section, table in (sections or {}).items():
        given[section] = {**given.get(section, {}), **table}
    return TrainConfig.model_validate(given)


def bucket_of(name: str) -> Bucket:
    """Return a shape that is neither square nor a power of two; of families of clips five frames."""
    frames = ORACLES[name].frames if any("video" in task for task in FAMILIES[name].tasks) else 1
    multiple = FAMILIES[name].multiple
    return Bucket(2 * max(32, multiple), 3 * max(32, multiple), frames)


def batch_of(
    family: ModelFamily, bucket: Bucket, captions: tuple[str, ...] | None = None, *, seed: int = 0, parts: Any = None
) -> Batch:
    """Make a batch of noise pictures with these captions, and the draws that a loader makes for them."""
    captions = captions or ORACLES[family.name].captions or CAPTIONS
    generator, count = torch.Generator().manual_seed(seed), len(captions)
    frames = (bucket.frames,) if bucket.frames > 1 else ()
    shape = (count, 3, *frames, bucket.height, bucket.width)
    features = {"pixels": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)}
    for number in range(family.num_control):
        features[image_feature(CONTROL, number)] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    features |= family.tokenizer(parts)(list(captions))
    for place, (name, value) in enumerate(family.size_features((bucket.height, bucket.width), count).items()):
        features[name] = value + 8 * place + torch.arange(count)[:, None]  # no two are alike, so that none is mistaken
    uses = [Draw(i, i.to_bytes(16, "little"), seed) for i in range(count)]
    draws = {name: host_draws(name, spec, bucket, uses, 0) for name, spec in family.features.draws.items()}
    ids = torch.arange(count)
    return Batch(bucket, ids, torch.zeros_like(ids), features, draws, keys=tuple(use.key for use in uses), step=0)


def made(cfg: TrainConfig) -> ModelFamily:
    """Make a family, which is one of the kit."""
    family = make_family(cfg)
    assert isinstance(family, ModelFamily)
    return family


def loaded(cfg: TrainConfig) -> Tiny:
    """Load a family and make a batch for it."""
    family = made(cfg)
    parts = family.load()
    return Tiny(family, parts, batch_of(family, bucket_of(family.name), parts=parts))


def trained_once(tiny: Tiny) -> Tiny:
    """Make weights that are zeros in a fresh model into others, so that nothing of it is silent."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for each in tiny.parts.root.parameters():
            if not each.any():
                each.copy_(0.05 * torch.randn(each.shape, generator=generator))
    return tiny


def needs_blocks(tiny: Tiny) -> None:
    """Leave a test out for a network without a list of blocks, as a UNet: its family says `denoise` whole."""
    if not tiny.family.blocks:
        pytest.skip("it has no list of blocks")


def exported(tiny: Tiny, folder: Path, layout: str = "diffusers_safetensors") -> Path:
    """Write a family's weights as they are."""
    return tiny.family.export(iter(tiny.weights().items()), tiny.parts, layout, folder, metadata={"title": "tiny"})


# ------------------------------------------------------------------ what diffusers says


def _oracles() -> dict[str, Oracle]:
    files = sorted((Path(__file__).parent / "family_oracles").glob("*.py"))
    return {file.stem: importlib.import_module(f"family_oracles.{file.stem}").ORACLE for file in files}


ORACLES = _oracles()


def diffusers_forward(tiny: Tiny, inputs: Inputs) -> torch.Tensor:
    """Predict by diffusers' own forward."""
    oracle = ORACLES[tiny.family.name]
    guidance = tiny.family.cfg.model.guidance
    return oracle.forward(tiny.net, inputs.x_t, inputs.timestep, inputs.conditions, guidance)


def own_pass(tiny: Tiny, inputs: Inputs) -> torch.Tensor:
    """Predict by the family's pass."""
    return tiny.family.denoise(tiny.net, inputs.x_t, inputs.timestep, inputs.conditions, passes.PassPlan()).velocity


def pipeline_of(folder: Path, name: str) -> Any:
    """Load an export into the family's pipeline."""
    import diffusers

    if (own := ORACLES[name].pipeline) is not None:
        return own(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, load = getattr(diffusers, FAMILIES[name].pipeline), ORACLES[name].load
        return kind.from_pretrained(folder) if load is None else load(kind, folder)
