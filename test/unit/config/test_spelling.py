"""Messages name fields, and each door spells them in its own way."""

from __future__ import annotations

import pytest

from difftrain.config.spellings.spelling import option, speaking, spelled


@pytest.mark.parametrize(
    ("field", "value", "kohya", "train"),
    [
        ("data.max_rejected_share", None, "--max_rejected_share", "--data.max_rejected_share"),
        ("training.compile", True, "--torch_compile", "--optimization.compile=true"),
        ("save.resume", "auto", "--resume=auto", "--resume_from_checkpoint=auto"),
        ("model.prediction_type", "v_prediction", "--v_parameterization", "--model.v_pred=true"),
        ("training.full_precision", "bf16", "--full_bf16", "--training.full_precision=bf16"),
        ("data.tar_order", "sequential", "--tar_order=sequential", "--data.sd3_streaming_dataset=true"),
        ("training.batch_size", 3, "--train_batch_size=3", "--training.micro_batch_size_per_gpu=3"),
        ("cache.only", True, "--cache_only", "--cache_only"),
        ("loss.text_recon_gamma", None, "[loss] text_recon_gamma", "--loss.text_recon_gamma"),
    ],
)
def test_each_door_spells_a_setting(field: str, value: object, kohya: str, train: str) -> None:
    text = f"{{{field}}}" if value is None else f"{{{field}={str(value).lower() if value is True else value}}}"
    assert option(field, value) == spelled(text) == kohya
    with speaking("train"):
        assert option(field, value) == spelled(text) == train
    assert option(field, value, door="train") == train and option(field, value) == kohya


@pytest.mark.parametrize(
    ("field", "value", "spelt"),
    [
        ("training.max_epochs", None, "--num_train_epochs"),
        ("save.resume", "auto", "--resume_from_checkpoint=latest"),
        ("optimizer.type", "AdamW8bit", "--use_8bit_adam"),
        ("optimizer.type", None, "[optimizer] type"),
        ("data.random_crop", False, "--center_crop"),
        ("data.random_crop", True, "[data] random_crop=true"),
        ("cache.latents", True, "[cache] latents=true"),
    ],
)
def test_the_door_of_diffusers_example_spells_its_own(field: str, value: object, spelt: str) -> None:
    with speaking("text_to_image"):
        assert option(field, value) == spelt
    assert option(field, value, door="text_to_image") == spelt
