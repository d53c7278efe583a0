"""The table of flags of train_text_to_image.py: those of diffusers' example of that name, in its order, then ours.

Every row says what the flag sets, or why it is not offered; its meaning is its field's (config/schema/), unless the row
has a help of its own. Help, faults, docs/text_to_image.md and the tests read it from here. Source of the names, defaults
and meanings: diffusers v0.26.3, examples/text_to_image/train_text_to_image.py.
"""

from __future__ import annotations

from typing import Any

from difftrain.config.spellings.row import Row

# what nobody gives and is another thing here than the field's own default
DEFAULTS: dict[str, Any] = {
    # pictures: the shorter side is resized to --resolution, and a square is cut out of it
    "data.resolution": (512, 512),
    "data.random_crop": True,
    "data.resize_interpolation": "bilinear",
    "data.image_column": "image",
    "data.caption_column": "text",
    "data.workers": 0,
    # training
    "training.batch_size": 16,
    "optimizer.learning_rate": 1e-4,
    "loss.min_snr_plus_one": True,
    "ema.ramp": True,
    "model.vae_fp32": False,  # frozen parts compute in the mixed precision
    # what is written
    "save.output_dir": "sd-model-finetuned",
    "save.naming": "diffusers",
    "save.model_as": "diffusers_safetensors",
    "save.checkpoint_every_n_steps": 500,
    "sample.every_n_epochs": 5,
    "sample.from_first_epoch": True,
    "sample.sampler": "pndm",
    "logging.tracker_name": "text2image-fine-tune",
}
NUM_EPOCHS, WARMUP_STEPS = 100, 500
ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_weight_decay": 1e-2, "adam_epsilon": 1e-8}

# fmt: off
DIFFUSERS: tuple[Row, ...] = (
    Row("input_perturbation", "float", "noise.ip_gamma"),
    # model
    Row("pretrained_model_name_or_path", "str", "model.pretrained"),
    Row("revision", "str", "?revision", "branch, tag or commit of {model.pretrained} on a hub"),
    Row("variant", "str", "", "files of weights are found by themselves, those of a variant where there are no others; for"
        " a certain one give a folder that holds it alone", "refused"),
    # data
    Row("dataset_name", "str", "?dataset_name",
        "folder or hub id of images with captions, tars or parquet; its train split is read"),
    Row("dataset_config_name", "str", "?dataset_config_name", "sub-folder of --dataset_name that is read; default: all of it"),
    Row("train_data_dir", "str", "?train_data_dir",
        "folder of images with metadata.jsonl, .csv or .parquet, or with caption files; with --dataset_name its sub-folder"),
    Row("image_column", "str", "data.image_column"),
    Row("caption_column", "str", "data.caption_column"),
    Row("max_train_samples", "int", "data.max_samples"),
    Row("validation_prompts", "strs", "sample.texts"),
    Row("output_dir", "str", "save.output_dir"),
    Row("cache_dir", "str", "data.cache_dir"),
    Row("seed", "int", "training.seed"),
    Row("resolution", "size", "data.resolution", "side of the square that an image is resized to and cut to",
        default=512),
    Row("center_crop", "switch", "data.random_crop", "cut in the middle instead of at a random place", sets=False),
    Row("random_flip", "switch", "data.flip"),
    # training
    Row("train_batch_size", "int", "training.batch_size"),
    Row("num_train_epochs", "int", "training.max_epochs", default=NUM_EPOCHS),
    Row("max_train_steps", "int", "training.max_steps", "optimizer updates; wins over {training.max_epochs}", default=""),
    Row("gradient_accumulation_steps", "int", "training.accumulation"),
    Row("gradient_checkpointing", "switch", "training.gradient_checkpointing"),
    Row("learning_rate", "float", "optimizer.learning_rate"),
    Row("scale_lr", "switch", "?scale_lr",
        "multiply the rate by {training.batch_size}, {training.accumulation} and the number of processes"),
    Row("lr_scheduler", "str", "optimizer.scheduler"),
    Row("lr_warmup_steps", "int", "optimizer.warmup_steps", default=WARMUP_STEPS),
    Row("snr_gamma", "float", "loss.min_snr_gamma"),
    Row("use_8bit_adam", "switch", "optimizer.type", "AdamW whose state has 8 bits, of bitsandbytes", sets="AdamW8bit"),
    Row("allow_tf32", "switch", "training.allow_tf32"),
    Row("use_ema", "switch", "ema.enable"),
    Row("non_ema_revision", "str", "?non_ema_revision",
        "the same as --revision; the UNet of another one is not read: give {model.pretrained} of that revision"),
    Row("dataloader_num_workers", "int", "data.workers"),
    Row("adam_beta1", "float", "?adam_beta1", "decay of AdamW's mean of gradients", default=ADAM["adam_beta1"]),
    Row("adam_beta2", "float", "?adam_beta2", "decay of AdamW's mean of squares", default=ADAM["adam_beta2"]),
    Row("adam_weight_decay", "float", "?adam_weight_decay", "weight decay of AdamW", default=ADAM["adam_weight_decay"]),
    Row("adam_epsilon", "float", "?adam_epsilon", "AdamW's eps", default=ADAM["adam_epsilon"]),
    Row("max_grad_norm", "float", "training.max_grad_norm"),
    # hub
    Row("push_to_hub", "switch", "?push_to_hub", "send the pipeline to a hub at the end"),
    Row("hub_token", "str", "", "moved to the environment; better given there", secret="HF_TOKEN"),
    Row("prediction_type", "str", "model.prediction_type",
        "what the UNet predicts; unset: what the weights' own scheduler_config.json says", default=""),
    Row("hub_model_id", "str", "?hub_model_id", "repository of --push_to_hub; unset: your own, named as {save.output_dir}"),
    # outputs
    Row("logging_dir", "str", "logging.logging_dir", "folder of TensorBoard events, below {save.output_dir}", default="logs"),
    Row("mixed_precision", "str", "training.mixed_precision",
        "compute precision; unset: what accelerate's launcher says; weights stay fp32"),
    Row("report_to", "str", "?report_to", "tracker beside metrics.jsonl: tensorboard, wandb, swanlab, mlflow or all", default="tensorboard"),
    Row("local_rank", "str", "", "handed over by launchers; taken where the environment has no LOCAL_RANK", default=-1),
    Row("checkpointing_steps", "int", "save.checkpoint_every_n_steps"),
    Row("checkpoints_total_limit", "int", "save.last_n_states"),
    Row("resume_from_checkpoint", "str", "save.resume",
        "checkpoint-N of {save.output_dir}, a folder, or latest: the newest whole one there, else a fresh start",
        words={"latest": "auto"}),
    Row("enable_xformers_memory_efficient_attention", "switch", "training.attention",
        "ignored: the fastest exact attention of the device is always used", "nearest", sets="xformers"),
    Row("noise_offset", "float", "noise.offset"),
    Row("validation_epochs", "int", "sample.every_n_epochs"),
    Row("tracker_project_name", "str", "logging.tracker_name"),
)

OURS: tuple[Row, ...] = (
    Row("preempt_file", "str", "save.preempt_file"),
    Row("webhook_url", "str", "", "address that notices of the run are sent to; better given in the environment, as"
        " DIFFTRAIN_WEBHOOK_URL", secret="DIFFTRAIN_WEBHOOK_URL"),
    Row("config", "str", "", "sectioned TOML of this package, for every other setting; flags win"),
    Row("dry_run", "switch", "",
        "say in ten lines what the run would be, and whether it fits; full: with configuration, buckets and FLOPs. Touches no device",
        choices=("full",)),
    Row("dry_run_ranks", "str", "", "numbers of ranks that --dry_run says memory, bytes sent and scaling for, such as 8,64,1024"),
    Row("family", "str", "model.family", "which model it is; unset: read from the weights", default=""),
    Row("init_from_config", "str", "model.init_from_config"),
    Row("vae", "str", "model.vae"),
    Row("tokenizer1_path", "str", "model.tokenizer1"),
    Row("device", "str", "training.device"),
    Row("engine", "str", "training.engine"),
    Row("shard", "str", "fsdp.shard"),
    Row("shard_size", "int", "fsdp.shard_size"),
    Row("threads", "int", "training.threads"),
    Row("ddp_timeout", "int", "training.ddp_timeout_min"),
    Row("performance", "switch", "training.performance"),
    Row("log_every", "int", "logging.log_every"),
    Row("timed_step", "int", "logging.timed_step"),
    Row("loss_target", "float", "logging.loss_target"),
    Row("trace", "str", "logging.trace"),
)
# fmt: on

FLAGS: dict[str, Row] = {flag.name: flag for flag in (*DIFFUSERS, *OURS)}
