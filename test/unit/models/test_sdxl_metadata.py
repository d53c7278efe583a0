"""The header of exports: modelspec and kohya's keys, all text, without paths of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sdxl import config

from difftrain import __version__
from difftrain.contracts import ConfigFault, RunFacts
from difftrain.models.families.sdxl import SDXLFamily

FACTS = RunFacts(
    step=12, epoch=2, total_steps=12, num_epochs=2, global_batch=4, started_at=1000.5, session_id="42",
    data={"draws_per_epoch": 10, "buckets": {"64x32": 6, "32x64": 4}, "fingerprint": "abc"},
)  # fmt: skip
SECTIONS = {
    "training": {"seed": 1, "batch_size": 2},
    "data": {"dirs": ("/data/one", "/data/two/"), "repeats": (3,), "resolution": (64, 32)},
    "optimizer": {"learning_rate": 1e-4, "args": ("weight_decay=0.1",)},
    "metadata": {"title": "Stars", "author": "A", "training_comment": "first"},
    "save": {"output_name": "stars"},
}


def test_modelspec_of_a_conversion() -> None:
    found = SDXLFamily(config()).metadata("last", 1700000000.7)
    date = found.pop("modelspec.date")
    assert len(date) == 19 and date[10] == "T"
    assert found == {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-xl-v1-base",
        "modelspec.implementation": "difftrain",
        "modelspec.implementation_version": __version__,
        "modelspec.title": "last",
        "modelspec.resolution": "64x64",
        "modelspec.prediction_type": "epsilon",
    }


def test_a_run_adds_kohyas_keys() -> None:
    found = SDXLFamily(config(SECTIONS, prediction_type="v_prediction")).metadata("last", 2000.0, FACTS)
    assert all(isinstance(value, str) for value in found.values())
    assert found["modelspec.title"] == "Stars" and found["modelspec.author"] == "A"
    assert found["modelspec.prediction_type"] == "v" and found["modelspec.resolution"] == "64x32"
    expected = {
        "ss_steps": "12", "ss_epoch": "2", "ss_max_train_steps": "12", "ss_total_batch_size": "4",
        "ss_batch_size_per_device": "2", "ss_learning_rate": "0.0001", "ss_optimizer": "AdamW(weight_decay=0.1)",
        "ss_seed": "1", "ss_output_name": "stars", "ss_num_train_images": "10", "ss_num_batches_per_epoch": "5",
        "ss_training_started_at": "1000.5", "ss_training_finished_at": "2000.0", "ss_training_comment": "first",
        "ss_base_model_version": "sdxl_base_v1-0", "ss_sd_model_name": "random weights (tiny)", "ss_vae_name": "None",
        "ss_text_encoder_lr": "None", "ss_v_parameterization": "True",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert json.loads(found["ss_dataset_dirs"]) == {"one": {"n_repeats": 3}, "two": {"n_repeats": 3}}
    assert json.loads(found["ss_bucket_info"]) == {
        "buckets": {"0": {"resolution": [64, 32], "count": 6}, "1": {"resolution": [32, 64], "count": 4}}
    }


def test_no_path_of_the_machine_is_written(tmp_path: Path) -> None:
    vae = tmp_path / "vae.safetensors"
    vae.write_bytes(b"")
    cfg = config(SECTIONS).model_copy(update={"model": config(vae=str(vae)).model})
    from difftrain.models.metadata import kohya_keys

    found = kohya_keys(cfg, FACTS, 2000.0, "sdxl_base_v1-0", {})
    assert found["ss_vae_name"] == "vae.safetensors"
    assert not any("/data" in value or str(tmp_path) in value for value in found.values())


@pytest.mark.flags("metadata_thumbnail")
def test_a_thumbnail_becomes_a_data_url(tmp_path: Path) -> None:
    (tmp_path / "t.png").write_bytes(b"abc")

    def given(value: str) -> str:
        sections = {"metadata": {"thumbnail": value}}
        return SDXLFamily(config(sections)).metadata("last", 0.0)["modelspec.thumbnail"]

    assert given(str(tmp_path / "t.png")) == "data:image/png;base64,YWJj" == given("data:image/png;base64,YWJj")
    with pytest.raises(ConfigFault, match="--metadata_thumbnail"):
        given(str(tmp_path / "absent.png"))


def test_no_token_is_handed_on_with_weights() -> None:
    token = "hf_" + "abcdefgh" * 4
    sections = {
        "metadata": {
            "author": f"me {token}",
            "description": "https://me:secret-word@host/x",
            "training_comment": token,
        },
        "save": {"output_name": f"run-{token}"},
    }
    family = SDXLFamily(config(sections))
    header = json.dumps(family.metadata(f"title {token}", 0.0, FACTS))
    assert token not in header and "secret-word" not in header and "***" in header
