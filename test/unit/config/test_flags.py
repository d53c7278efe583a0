"""The table of flags: complete, true to kohya's list, and every field of the configuration within reach."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from difftrain.config.render.docs import flags_page
from difftrain.config.schema.validate import choices_of, default_of, fields
from difftrain.config.spellings.flags import FLAGS, KOHYA, OURS, flag_of
from difftrain.config.spellings.row import AS_OURS, Row

ROOT = Path(__file__).parents[3]
SPEC = {
    row[0]: row[1:] for row in json.loads((Path(__file__).parents[1] / "files/kohya_flags.json").read_text())["flags"]
}

# frozen: a name that leaves this list breaks somebody's script; one that joins it is a promise
FROZEN_OURS = {
    "config", "dry_run", "family", "init_from_config", "tokenizer1_path", "tokenizer2_path", "half_vae",
    "partition_method", "partition_split", "pipeline_schedule", "pipeline_stages",
    "enable_npu_flash_attention", "max_train_epoch", "engine", "device", "threads", "performance", "max_skipped_steps",
    "use_ema", "ema_decay", "ema_profiles", "ema_snapshot_precision", "allow_empty_caption", "max_rejected_share", "cache_dir", "tar_order", "epoch_batches",
    "tar_streams", "tar_window", "verify_data", "image_column", "caption_column", "validation_split", "validation_seed",
    "validate_every_n_steps", "validate_every_n_epochs", "max_validation_steps", "log_every", "training_comment",
    "no_metadata", "cache_only", "prior_loss_weight", "demo", "demo_score", "unet_lr", "text_encoder_lr", "optimizer_schedulefree_wrapper",
    "image_decoder", "schedulefree_wrapper_args", "skip_until_initial_step", "initial_step", "initial_epoch",
    "trust_cache", "regenerate_cache", "cache_latents_as", "cache_latents_dtype", "cache_text_dtype", "cache_dtypes",
    "cache_shuffle_num", "cache_preload", "cache_batch_size", "cache_workers", "cache_segment_gib", "cache_copy_gib",
    "trace", "webhook_url", "mask_mean", "deepspeed_config", "dry_run_ranks",
    "preempt_file", "save_async", "blocks_to_swap", "memory_gib",
    "shard", "shard_size", "fsdp_reshard_after_forward", "fsdp_reduce", "fsdp_cpu_offload",
}  # fmt: skip
FROZEN_LATER = {
    "master_weights",
    "cpu_offload_checkpointing", "fp8_base_unet", "network_module", "network_dim",
    "network_alpha", "network_weights", "network_dropout", "network_args", "network_train_unet_only",
    "network_train_text_encoder_only", "dim_from_weights", "scale_weight_norms", "base_weights",
    "base_weights_multiplier",
}  # fmt: skip

KINDS = {"StoreTrue": "switch", "str": "str", "int": "int", "float": "float", "int_or_float": "number",
         "str nargs=*": "strs", "Path": "str"}  # fmt: skip
# ours take more than kohya's
WIDER = {
    "train_data_dir": "strs",
    "reg_data_dir": "strs",
    "dataset_repeats": "ints",
    "resolution": "size",
    "block_lr": "floats",
    "face_crop_aug_range": "floats",
}


def test_names_are_frozen() -> None:
    assert [flag.name for flag in KOHYA] == list(SPEC) and len(KOHYA) == 176
    assert {flag.name for flag in OURS} == FROZEN_OURS | FROZEN_LATER
    assert len(FLAGS) == len(KOHYA) + len(OURS)


@pytest.mark.parametrize("flag", KOHYA, ids=lambda flag: flag.name)
def test_kinds_and_choices_are_kohyas(flag: Row) -> None:
    kind, _, choices = SPEC[flag.name]
    assert flag.kind == WIDER.get(flag.name, KINDS[kind])
    if limited := (flag.to and choices_of(flag.to)):
        assert set(choices) <= {str(choice) for choice in limited}


def kohya_default(name: str) -> object:
    kind, text, _ = SPEC[name]
    if text == "None":
        return None
    return ast.literal_eval(text) if kind not in ("str", "Path", "str nargs=*") else text


@pytest.mark.parametrize("flag", [f for f in KOHYA if f.to and f.status == "offered"], ids=lambda flag: flag.name)
def test_defaults_are_kohyas_or_the_table_names_the_difference(flag: Row) -> None:
    theirs, ours = kohya_default(flag.name), default_of(flag.to)
    if flag.kind == "switch":
        assert theirs is False and ours != flag.sets
    elif flag.kohya is AS_OURS:
        same = {"dataset_repeats": (1,), "train_data_dir": ()}.get(flag.name, theirs)
        assert ours == same
    else:
        assert theirs == flag.kohya and ours != flag.kohya


def test_every_flag_has_a_field() -> None:
    reachable = {flag.to for flag in FLAGS.values() if flag.to and not flag.to.startswith("?")}  # "?": settled later
    assert reachable <= set(fields())
    assert all(flag_of(path) is not None for path in reachable)


def test_a_flag_without_a_field_is_one_that_acts_by_itself() -> None:
    bare = {flag.name for flag in FLAGS.values() if not flag.to and flag.status == "offered"}
    assert bare >= {"config", "config_file", "output_config", "dry_run", "huggingface_token", "wandb_api_key"}
    assert bare <= {
        "config",
        "config_file",
        "output_config",
        "dry_run",
        "debug_dataset",
        "huggingface_token",
        "wandb_api_key",
        "webhook_url",
        "deepspeed_config",
        "dry_run_ranks",
    }


def test_few_are_refused_and_all_that_are_not_offered_say_why() -> None:
    assert sum(flag.status in ("refused", "later") for flag in KOHYA) <= 12
    assert all(flag.help and not flag.to for flag in FLAGS.values() if flag.status in ("later", "refused"))


def test_the_page_of_flags_is_current() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags_page(), "python -m difftrain.config.render.docs flags > docs/flags.md"
    assert all(f"`{flag.option}" in page for flag in FLAGS.values())


@pytest.mark.parametrize(("low", "high", "sides"), [(100, 1000, (64, 1024)), (32, 1024, (32, 1024))])
def test_the_page_says_how_bucket_sides_are_rounded(low: int, high: int, sides: tuple[int, int]) -> None:
    from difftrain.config.schema.sections import DataSection
    from difftrain.data.plan.buckets import BucketTable

    text = " ".join(flags_page().split())
    (said,) = re.findall(r"`--min_bucket_reso` [^.|]*`--bucket_reso_steps`[^.|]*", text)
    assert "`--max_bucket_reso`" in said and "down" in said and "up" in said
    resolution = {"resolution": (256, 256), "enable_bucket": True, "bucket_reso_steps": 64}
    table = BucketTable.of(DataSection(min_bucket_reso=low, max_bucket_reso=high, **resolution))
    assert (min(min(table.sizes)), max(max(table.sizes))) == sides
