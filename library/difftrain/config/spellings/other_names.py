"""What other trainers, and our own other entry points, call a setting: looked up before a misspelling is guessed at.

Names of kohya's scripts, diffusers' examples, diffusion-pipe, SimpleTuner, OneTrainer and accelerate, each with the field
that means it here. A name that an entry point takes is never looked up there.
"""

from __future__ import annotations

from difftrain.config.spellings.spelling import option

NAMES: dict[str, tuple[str, ...]] = {
    "model.pretrained": (
        "base_model", "base_model_name", "checkpoint", "ckpt", "ckpt_path", "model", "model_id", "model_name",
        "model_name_or_path", "model_path", "pretrained_model", "pretrained_model_name", "pretrained_model_name_or_path",
        "pretrained_path", "unet_path",
    ),
    "model.vae": ("pretrained_vae", "pretrained_vae_model_name_or_path", "vae", "vae_model", "vae_model_path", "vae_path"),
    "model.family": ("model_family", "model_flavour", "model_type"),
    "data.dirs": (
        "data", "data_dir", "data_path", "dataset_dir", "dataset_name", "dataset_path", "image_dir", "image_folder",
        "instance_data_dir", "train_data", "train_data_dir",
    ),
    "data.dataset_config": ("data_backend_config", "dataset_toml"),
    "data.resolution": ("image_size", "resolution", "resolutions", "size"),
    "data.workers": (
        "dataloader_num_workers", "dataloader_threads", "max_data_loader_n_workers", "num_workers", "workers",
    ),
    "data.flip": ("random_flip",),
    "captions.dropout_rate": ("caption_dropout", "caption_dropout_probability", "proportion_empty_prompts"),
    "training.batch_size": (
        "batch", "batch_size", "batchsize", "bs", "micro_batch_size", "micro_batch_size_per_gpu", "per_device_train_batch_size",
        "train_batch_size", "train_micro_batch_size_per_gpu",
    ),
    "training.accumulation": (
        "accumulation", "accumulation_steps", "grad_accum", "grad_accum_steps", "gradient_accumulation",
        "gradient_accumulation_steps",
    ),
    "training.max_steps": ("iterations", "max_iters", "max_steps", "max_train_steps", "num_steps", "num_train_steps", "steps", "train_steps"),
    "training.max_epochs": ("epochs", "max_epochs", "max_train_epoch", "max_train_epochs", "n_epochs", "num_epochs", "num_train_epochs"),
    "training.mixed_precision": ("amp", "dtype", "mixed_precision", "precision", "train_dtype"),
    "training.gradient_checkpointing": ("activation_checkpoint", "activation_checkpointing", "grad_checkpointing", "gradient_checkpointing"),
    "training.max_grad_norm": ("clip_grad", "clip_grad_norm", "grad_clip", "gradient_clip", "gradient_clipping", "max_grad_norm"),
    "training.seed": ("global_seed", "manual_seed", "random_seed", "seed"),
    "training.compile": ("compile", "torch_compile", "use_compile"),
    "optimizer.type": ("optim", "optimizer", "optimizer_name", "optimizer_type"),
    "optimizer.learning_rate": ("learning_rate", "lr", "unet_learning_rate"),
    "optimizer.scheduler": ("learning_rate_scheduler", "lr_schedule", "lr_scheduler", "scheduler"),
    "optimizer.warmup_steps": ("learning_rate_warmup_steps", "lr_warmup", "lr_warmup_steps", "num_warmup_steps", "warmup", "warmup_steps"),
    "loss.min_snr_gamma": ("min_snr", "min_snr_gamma", "snr_gamma"),
    "noise.offset": ("noise_offset", "offset_noise", "offset_noise_weight"),
    "flow.shift": ("discrete_flow_shift", "flow_schedule_shift", "flow_shift", "timestep_shift"),
    "ema.enable": ("ema", "use_ema"),
    "ema.decay": ("ema_decay", "ema_rate"),
    "save.output_dir": ("out_dir", "output", "output_dir", "output_directory", "output_folder", "output_path", "save_dir", "workspace_dir"),
    "save.every_n_steps": ("checkpoint_step_interval", "checkpointing_steps", "save_every", "save_every_n_steps", "save_interval", "save_steps"),
    "save.resume": ("resume", "resume_from", "resume_from_checkpoint"),
    "sample.prompts": ("sample_prompts", "user_prompt_library", "validation_prompt", "validation_prompts"),
    "sample.every_n_steps": ("sample_every", "sample_every_n_steps", "sample_steps", "validation_step_interval", "validation_steps"),
    "logging.log_every": ("log_every", "log_every_n_steps", "log_interval", "logging_steps", "steps_per_print"),
    "logging.log_with": ("log_with", "report_to", "tracker"),
}  # fmt: skip
_FIELDS = {name: path for path, names in NAMES.items() for name in names}


def meant(name: str) -> str:
    """Return the field that a name of elsewhere means, as the command line spells it; nothing where none is known."""
    path = _FIELDS.get(name.lower().replace("-", "_"))
    return f"here it is {option(path)}" if path else ""


def meant_key(name: str) -> str:
    """Return the key of train.py's file that a name of elsewhere means, with its table; nothing where none is known."""
    path = _FIELDS.get(name.lower().replace("-", "_"))
    if path is None:
        return ""
    table, _, key = option(path, door="train").removeprefix("--").rpartition(".")
    return f"here it is [{table}] {key}" if table else f"here it is {key}"
