"""Speed-ups through the engine: restarts bit by bit, over the step where a term ends too; off where nothing is trained."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import equal, one_thread, saved, weights  # noqa: F401
from sd3_speedups import batch_of, config, vision_folder

from difftrain.config.schema.sections import (
    LossSection,
    OptimizerSection,
    PatchMaskingSection,
    RepaSection,
    TrainConfig,
    TreadSection,
)
from difftrain.contracts import METRIC, Batch, Bucket, ConfigFault
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.native import NativeEngine
from difftrain.evaluation import quantile_losses
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.routing import KEEP
from difftrain.optim import make_optimizer, make_schedule
from difftrain.optim.muon import is_matrix

BUCKET, SAMPLES = Bucket(64, 64), 2
UNTIL = 3
WAYS: dict[str, dict[str, Any]] = {
    "tread": {"tread": TreadSection(share=0.5)},
    "masking": {"patch_masking": PatchMaskingSection(share=0.75, mixer_layers=1, until_step=UNTIL)},
    "repa": {"repa": RepaSection(layer=2, hidden=24, until_step=UNTIL)},
    "repa, routed, with text": {
        "repa": RepaSection(layer=2, hidden=24, until_step=UNTIL),
        "tread": TreadSection(share=0.5, end=2),
        "loss": LossSection(text_recon_gamma=0.1),
    },
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def cfg(request: pytest.FixtureRequest, tmp_path: Path) -> TrainConfig:
    sections = dict(request.param)
    if "repa" in sections:
        folder = vision_folder(tmp_path / "vision", "dinov2")
        sections["repa"] = sections["repa"].model_copy(update={"encoder": str(folder)})
    return config(**sections, optimizer=OptimizerSection(type="Muon", learning_rate=1e-3))


def built(cfg: TrainConfig) -> NativeEngine:
    family = SD3Family(cfg)
    engine = make_engine(cfg, choose("cpu"), Ranks())
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
        [],
    )
    assert isinstance(engine, NativeEngine)
    return engine


def batch(engine: NativeEngine, step: int | None, *, trains: bool = True) -> Batch:
    assert isinstance(engine.family, SD3Family)
    made = batch_of(engine.family, engine.parts, BUCKET, SAMPLES, step, trains=trains)
    shift = torch.full_like(made.draws["noise"], 0.01 * (step or 0))  # so that steps differ
    return replace(made, draws={**made.draws, "noise": made.draws["noise"] + shift})


def run(engine: NativeEngine, first: int, last: int) -> list[dict[str, float]]:
    stats = [engine.step([batch(engine, step)], {"samples": float(SAMPLES)}) for step in range(first, last)]
    found = [{name: float(value) for name, value in each.sums.items()} for each in stats]
    return [{name: value for name, value in each.items() if not math.isnan(value)} for each in found]  # as meters do


def test_two_steps_a_restart_and_three_more_are_five(cfg: TrainConfig, tmp_path: Path) -> None:
    straight = built(cfg)
    told = run(straight, 0, 2)
    saved(straight, tmp_path / "state")
    told += run(straight, 2, 5)
    resumed = built(cfg)
    resumed.restore(tmp_path / "state")
    assert run(resumed, 2, 5) == told[2:] and equal(weights(resumed), weights(straight))
    if cfg.repa.encoder is not None:
        assert all(each["repa"] > 0 and each[f"{METRIC}repa_loss"] > 0 for each in told[:UNTIL])
        assert all(each["repa"] == 0 and f"{METRIC}repa_loss" not in each for each in told[UNTIL:])
        for each in told:
            terms = each["denoise"] + each["repa"] + each.get("text_recon", 0.0)
            assert each["loss"] == pytest.approx(terms, rel=1e-6)
            assert each["repa"] == pytest.approx(0.5 * each.get(f"{METRIC}repa_loss", 0.0), rel=1e-6)
    else:
        assert "repa" not in told[0]


def test_nothing_of_it_is_in_evaluation(cfg: TrainConfig) -> None:
    engine, plain = built(cfg), built(config(loss=cfg.loss, optimizer=cfg.optimizer))
    found = engine.evaluate([batch(engine, None, trains=False)])
    assert float(found["loss"]) == float(plain.evaluate([batch(plain, None, trains=False)])["loss"])
    measures = {"denoise_loss", "text_recon_loss"} if cfg.loss.text_recon_gamma else {"denoise_loss"}
    rows = quantile_losses(engine, [batch(engine, None, trains=False)], engine.family.features.draws)
    assert all(row["metrics"].keys() == measures for row in rows)
    inputs = engine.family.inputs(batch(engine, None, trains=False), engine.parts)
    assert KEEP not in inputs.conditions and inputs.aux_targets == {}
    assert torch.equal(engine.predict(inputs), plain.predict(inputs))


@torch.no_grad()
def test_a_mask_counts_where_patches_are_seen(tmp_path: Path) -> None:
    """By hand: the loss is the mean over the mask of the kept patches alone."""
    cfg = config(patch_masking=PatchMaskingSection(share=0.5, mixer_layers=1))
    engine = built(cfg)
    made = batch(engine, 0)
    mask = (torch.rand(SAMPLES, 1, 64, 64, generator=torch.Generator().manual_seed(2)) > 0.4).float()
    made = replace(made, loss_mask=mask)
    inputs = engine.family.inputs(made, engine.parts)
    outputs = engine.family.forward(engine.root, inputs)
    found = engine.family.loss_sums(outputs, inputs)["loss"]
    places = made.draws[KEEP]
    assert places.shape == (SAMPLES, 8) and outputs[0].shape == (SAMPLES, 16, 16, 2)
    whole = engine.family.inputs(replace(made, draws={k: v for k, v in made.draws.items() if k != KEEP}), engine.parts)
    assert whole.mask is not None
    expected = 0.0
    for sample in range(SAMPLES):
        total = weight = 0.0
        for row, place in enumerate(places[sample].tolist()):
            y, x = 2 * (place // 4), 2 * (place % 4)
            m = whole.mask[sample, :, y : y + 2, x : x + 2]
            error = outputs[0][sample, :, 2 * row : 2 * row + 2] - whole.target[sample, :, y : y + 2, x : x + 2]
            total, weight = total + float((error.square().mean(0, keepdim=True) * m).sum()), weight + float(m.sum())
        expected += total / weight
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_projector_is_trained_and_not_exported(tmp_path: Path) -> None:
    folder = vision_folder(tmp_path / "vision", "dinov2")
    cfg = config(
        repa=RepaSection(encoder=str(folder), layer=2, hidden=24), optimizer=OptimizerSection(learning_rate=1e-3)
    )
    engine = built(cfg)
    before = weights(engine)
    run(engine, 0, 2)
    after = weights(engine)
    names = [name for name in after if name.startswith("projector.")]
    assert len(names) == 6 and not any(torch.equal(before[name], after[name]) for name in names)
    family = engine.family
    path = family.export(engine.full_weights(), engine.parts, "diffusers_safetensors", tmp_path / "export")
    from diffusers import SD3Transformer2DModel

    model, info = SD3Transformer2DModel.from_pretrained(path / "transformer", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not list(path.rglob("*vision*")) and len(model.transformer_blocks) == 3
    assert not any(name.startswith(("projector", "vision")) for name, _ in family.stream(engine.parts))


def test_of_sd3_the_attention_and_the_feed_forwards_are_matrices_and_nothing_else() -> None:
    weights = dict(SD3Family(config()).source.build("transformer").named_parameters())
    chosen = {name for name, weight in weights.items() if is_matrix(f"transformer.{name}", weight)}
    layer = re.compile(
        r"transformer_blocks\.\d\.(attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)|ff(_context)?\.net\.(0\.proj|2))\.weight"
    )
    assert chosen == {name for name in weights if layer.fullmatch(name)}
    assert len(chosen) == 12 + 12 + 9  # the last block's text ends with its attention
    others = {name.split(".")[0] for name in weights.keys() - chosen}
    assert others == {"transformer_blocks", "pos_embed", "time_text_embed", "context_embedder", "norm_out", "proj_out"}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a layer beyond": ({"repa": {"layer": 4}}, "--repa.layer: .* 4, .* 3 .*1 to 3"),
    "a start beyond": ({"tread": {"share": 0.5, "start": 4}}, "--tread.start: .* 4, .* 3"),
    "an end beyond": ({"tread": {"share": 0.5, "end": 4}}, "--tread.end: is block 4, .* has 3"),
    "no block behind the mixer": (
        {"patch_masking": {"share": 0.5, "mixer_layers": 3}},
        "--patch_masking.mixer_layers: 3 .*transformer .* 3 .*1 to 2",
    ),
}


@pytest.mark.parametrize(("sections", "words"), FAULTS.values(), ids=FAULTS)
def test_blocks_that_are_not_there_are_named(sections: Any, words: str, tmp_path: Path) -> None:
    if "repa" in sections:
        folder = vision_folder(tmp_path / "vision", "dinov2")
        sections = {"repa": {**sections["repa"], "encoder": str(folder)}}
    with pytest.raises(ConfigFault, match=words):
        SD3Family(config(**sections)).load(meta=True)
