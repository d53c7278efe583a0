"""Stable Diffusion 1 and 2: which states are read, what their files have beside the model, and which file is whose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Tiny, batch_of, config, exported, loaded, made
from safetensors.torch import load_file, save_file

from difftrain.contracts import Bucket, ConfigFault, RunFacts
from difftrain.models.families.sd1 import POSITION_IDS
from difftrain.models.families.sd2 import LAYERS, LOGIT_SCALE, PROJECTION
from difftrain.models.text.encode import encode

SMALL = Bucket(32, 32)
BOTH = pytest.mark.parametrize("name", ["sd1", "sd2"])
FACTS = RunFacts(step=1, epoch=1, total_steps=1, num_epochs=1, global_batch=1, started_at=1.0, session_id="1")
SPARE = f"{LAYERS}3."  # of the tiny size, whose encoder has three layers


def refused(name: str, **model: Any) -> str:
    with pytest.raises(ConfigFault) as caught:
        loaded(config(name, **model))
    (fault,) = caught.value.faults
    return f"{fault.what} {fault.remedy}"


# ------------------------------------------------------------------ captions


@BOTH
@pytest.mark.parametrize("skip", [None, 1, 2, 3])
def test_a_skipped_state_goes_through_the_last_norm(name: str, skip: int | None) -> None:
    """As kohya's tools read it: hidden_states[-n], then the norm; the output itself is that of 1."""
    layers = made(config(name)).source.sizes["text_encoder"]["num_hidden_layers"]
    if skip is not None and skip > layers:
        assert str(layers) in refused(name, clip_skip=skip)
        return
    tiny = loaded(config(name, clip_skip=skip))
    encoder: Any = tiny.parts.frozen["text_encoder"]
    ids = tiny.batch.features["input_ids_1"][:, 0]
    with torch.no_grad():
        read = encoder(ids, output_hidden_states=True)
        norm = next(each for place, each in encoder.named_modules() if place.endswith("final_layer_norm"))
        expected = norm(read.hidden_states[-(skip or 1)])
    found = encode(tiny.family.texts, 1, encoder, tiny.batch.features)["hidden_1"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.equal(read.last_hidden_state) == (skip in (None, 1))


@BOTH
def test_long_captions_are_read_in_chunks_and_filled_up_as_the_release_does(name: str) -> None:
    tiny = loaded(config(name, max_token_length=150))
    ids = batch_of(tiny.family, SMALL, ("a cat",)).features["input_ids_1"]
    assert ids.shape == (1, 2, 77) and tiny.inputs().conditions["hidden_1"].shape[1] == 152
    vocabulary = tiny.family.vocabularies[0]
    pad = vocabulary.eos_id if name == "sd1" else 0
    assert ids[0, 1].tolist() == [vocabulary.bos_id, vocabulary.eos_id, *[pad] * 75]


@BOTH
@pytest.mark.parametrize("skip", [None, 2])
def test_a_trained_encoder_has_no_gradient_but_where_the_loss_reaches(name: str, skip: int | None) -> None:
    tiny = loaded(config(name, {"optimizer": {"learning_rate_te1": 1e-4}}, train_text_encoder=True, clip_skip=skip))
    assert tiny.family.in_root == ("unet", "text_encoder")
    assert dict(tiny.family.rates) == {"unet": 1e-3, "text_encoder": 1e-4}
    tiny.loss().backward()
    named = dict(tiny.parts.root.get_submodule("text_encoder").named_parameters())
    frozen = {place for place, each in named.items() if not each.requires_grad}
    assert all((each.grad is None) == (place in frozen) for place, each in named.items())
    layers = tiny.family.source.sizes["text_encoder"]["num_hidden_layers"]
    assert bool(frozen) == (skip == 2) and all(f"layers.{layers - 1}." in place for place in frozen)


@pytest.mark.parametrize(("skip", "length"), [(None, 77), (2, 150)])
def test_operations_of_trained_encoders_are_those_that_torch_counts(skip: int | None, length: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tiny = loaded(config("sd2", train_text_encoder=True, clip_skip=skip, max_token_length=length))
    inputs = tiny.family.inputs(batch_of(tiny.family, SMALL, ("a",)), tiny.parts)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tiny.family.forward(tiny.parts.root, inputs)[0].sum().backward()
    assert counter.get_total_flops() == tiny.family.flops_per_sample(tiny.parts, SMALL)


# ------------------------------------------------------------------ single files


@pytest.fixture(scope="module")
def second() -> Tiny:
    return loaded(config("sd2"))


@pytest.fixture(scope="module")
def file(second: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(second, tmp_path_factory.mktemp("sd2") / "whole", "safetensors")


def header(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def test_the_layer_that_nothing_reads_is_a_copy_of_the_last_one(file: Path) -> None:
    """And what stood beside it is what kohya's tools write, where no file was loaded that has it."""
    stored = load_file(file)
    spare = {key: value for key, value in stored.items() if key.startswith(SPARE)}
    assert len(spare) == 12
    assert all(value.equal(stored[key.replace(SPARE, f"{LAYERS}2.")]) for key, value in spare.items())
    assert stored[PROJECTION].equal(torch.ones(40, 40)) and float(stored[LOGIT_SCALE]) == 1.0


def test_what_a_loaded_file_has_beside_the_model_is_written_back(second: Tiny, file: Path, tmp_path: Path) -> None:
    stored = load_file(file)
    unread = {key for key in stored if key.startswith(SPARE)} | {PROJECTION, LOGIT_SCALE}
    stored |= {key: stored[key] + 1 + place for place, key in enumerate(sorted(unread))}
    save_file(
        stored | {"cond_stage_model.model.attn_mask": torch.zeros(77, 77)}, tmp_path / "own.safetensors", header(file)
    )
    again = loaded(config("sd2", pretrained=str(tmp_path / "own.safetensors")))
    assert float(again.loss().detach()) == float(second.loss().detach())
    written = load_file(exported(again, tmp_path / "again", "safetensors"))
    assert written.keys() == stored.keys()
    assert [key for key, value in stored.items() if not written[key].equal(value)] == []


def test_a_file_without_the_unread_layer_is_read_and_one_with_two_of_them_is_not(file: Path, tmp_path: Path) -> None:
    stored = load_file(file)
    without = {key: value for key, value in stored.items() if not key.startswith(SPARE)}
    save_file(without, tmp_path / "less.safetensors", header(file))
    assert loaded(config("sd2", pretrained=str(tmp_path / "less.safetensors"))).net
    more = {key.replace(SPARE, f"{LAYERS}4."): value.clone() for key, value in stored.items() if key.startswith(SPARE)}
    save_file(stored | more, tmp_path / "more.safetensors", header(file))
    assert f"{LAYERS}4." in refused("sd2", pretrained=str(tmp_path / "more.safetensors"))


def test_older_files_call_the_text_encoder_otherwise(tmp_path: Path) -> None:
    tiny = loaded(config("sd1"))
    file = exported(tiny, tmp_path / "whole", "safetensors")
    stored = load_file(file)
    older = {key.replace(".transformer.text_model.", ".transformer."): value for key, value in stored.items()}
    assert POSITION_IDS in stored and POSITION_IDS not in older
    save_file(older, tmp_path / "older.safetensors", header(file))
    again = loaded(config("sd1", pretrained=str(tmp_path / "older.safetensors")))
    assert float(again.loss().detach()) == float(tiny.loss().detach())
    assert set(load_file(exported(again, tmp_path / "again", "safetensors"))) == set(stored)


# ------------------------------------------------------------------ whose a file or folder is


@pytest.mark.parametrize(("name", "other"), [("sd1", "sd2"), ("sd2", "sd1"), ("sdxl", "sd1"), ("sd1", "sdxl")])
def test_a_single_file_of_another_family_is_named(name: str, other: str, tmp_path: Path) -> None:
    """By what it says of itself, and by its keys where it says nothing: as released files do."""
    file = exported(loaded(config(other)), tmp_path / "whole", "safetensors")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(file), bare, {"format": "pt"})
    for each in (file, bare):
        said = refused(name, pretrained=str(each))
        assert str(each) in said and FAMILIES[other].title in said and f"type = {other!r}" in said


def test_pipelines_that_are_variants_of_another_family_are_not_taken_for_this_one(tmp_path: Path) -> None:
    for kind, other in (("StableDiffusionXLImg2ImgPipeline", "sdxl"), ("StableDiffusion3InpaintPipeline", "sd3")):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
        assert f"type = {other!r}" in refused("sd1", pretrained=str(tmp_path)), kind


# ------------------------------------------------------------------ headers


@pytest.mark.parametrize(
    ("name", "prediction", "architecture", "version", "size"),
    [
        ("sd1", "epsilon", "stable-diffusion-v1", "sd_v1", "512x512"),
        ("sd1", "v_prediction", "stable-diffusion-v1", "sd_v1_v", "512x512"),
        ("sd2", "epsilon", "stable-diffusion-v2-512", "sd_v2", "768x768"),
        ("sd2", "v_prediction", "stable-diffusion-v2-768-v", "sd_v2_v", "768x768"),
    ],
)
def test_headers_say_what_kohyas_do(name: str, prediction: str, architecture: str, version: str, size: str) -> None:
    family = made(config(name, init_from_config="base", prediction_type=prediction))
    found = family.metadata("last", 2000.0, FACTS)
    assert found["modelspec.architecture"] == architecture and found["modelspec.resolution"] == size
    assert found["ss_base_model_version"] == version and found["ss_v2"] == str(name == "sd2")
    assert found["ss_v_parameterization"] == str(prediction == "v_prediction")


def test_the_released_sizes() -> None:
    """UNets of 859,520,964 and 865,910,724 parameters, encoders of 123,060,480 and 340,387,840."""
    found = {}
    for name in ("sd1", "sd2"):
        source = made(config(name, init_from_config="base")).source
        found[name] = sum(each.numel() for each in source.build("unet").parameters()), source.count("text_encoder")
    assert found == {"sd1": (859520964, 123060480), "sd2": (865910724, 340387840)}
