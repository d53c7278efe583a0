"""The one table of train.py's keys: the sectioned spelling, the flat one of diffusion-pipe, and where each leads.

Every row says what the key sets, or why it is not offered; its meaning is its field's (config/schema/), unless the row
has a help of its own. Reading, --help, docs/train_toml.md and the tests take it from here. A field without a row is spelt
[section] field. What is no key is an option of the command line.
"""

from __future__ import annotations

from typing import Any

from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import choices_of
from difftrain.config.spellings.row import Kind, Row
from difftrain.models.registry import FAMILIES

LATEST = "latest"

# fmt: off
OPTIONS: dict[str, Row] = {row.name: row for row in (
    Row("config", "str", "", "TOML file of the run", takes="FILE"),
    Row("dataset", "str", "data.dataset_config", "the same as --output.dataset", takes="FILE"),
    Row("resume_from_checkpoint", "str", "save.resume",
        "go on from the newest whole checkpoint below output_dir, from the one of a step, or from a folder",
        takes="[FOLDER|STEP]"),
    Row("reset_dataloader", "switch", "save.reset_dataloader"),
    Row("reset_optimizer", "switch", "save.reset_optimizer"),
    Row("reset_optimizer_params", "switch", "save.reset_optimizer_params"),
    Row("save_async", "switch", "save.asynchronous"),
    Row("cache_only", "switch", "cache.only"),
    Row("trust_cache", "switch", "cache.trust"),
    Row("regenerate_cache", "switch", "cache.regenerate"),
    Row("i_know_what_i_am_doing", "switch", "training.only_warn"),
    Row("test_sample", "switch", "sample.test_only"),
    Row("trace", "str", "logging.trace", takes="STEPS"),
    Row("dump_dataset", "str", "", "write every sample of the first epoch, as training sees it, and stop", takes="DIR"),
    Row("dry_run", "switch", "", "say in ten lines what the run would be, and whether it fits; full: with configuration, buckets and FLOPs. Touches no device", choices=("full",)),
    Row("dry_run_ranks", "str", "", "numbers of ranks that --dry_run says memory, bytes sent and scaling for, such as 8,64,1024", takes="N,N,..."),
    Row("engine", "str", "", "the same as --engine.type", takes="NAME"),
    Row("shard", "str", "", "the same as --engine.shard", takes="full|hybrid"),
    Row("shard_size", "str", "", "the same as --engine.shard_size", takes="N"),
    Row("pipeline_stages", "str", "", "the same as --optimization.pipeline_stages", takes="N"),
    Row("sequence_parallel", "str", "", "the same as --engine.sequence_parallel", takes="N"),
    Row("memory_gib", "str", "", "the same as --memory.memory_gib", takes="GIB"),
    Row("deepspeed", "switch", "?deepspeed", "for command lines that have it: runs natively, and says so, unless --deepspeed_config shards"),
    Row("deepspeed_config", "str", "?deepspeed_config", "DeepSpeed's JSON (docs/engines.md); with a zero stage of 1 to 3 the run is sharded by accelerate's plugin", takes="FILE"),
    Row("local_rank", "str", "", "handed over by launchers; taken where the environment has no LOCAL_RANK", takes="N"),
    Row("master_port", "str", "", "the same for MASTER_PORT", takes="N"),
)}
# fmt: on


# options that are keys without their table -> the key
SHORT = {
    "engine": "engine.engine", "shard": "engine.shard", "shard_size": "engine.shard_size",
    "pipeline_stages": "optimization.pipeline_stages", "memory_gib": "memory.memory_gib",
    "sequence_parallel": "engine.sequence_parallel",
}  # fmt: skip
# a key of one may stand in the other
SWAPPED = {"training": "optimization", "optimization": "training"}
CONSTRUCTOR = "optimizer"  # what nobody knows there goes to the optimizer
MIXED = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "no", "bf16": "bf16", "fp16": "fp16", "fp32": "no", "no": "no",
}  # fmt: skip
STORED = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "float", "bf16": "bf16", "fp16": "fp16", "fp32": "float", "float": "float",
}  # fmt: skip
STORAGE_DTYPES = {
    **{name: name for name in ("bfloat16", "float16", "float32")},
    **dict.fromkeys(("float8", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), "float8"),
}  # fmt: skip
_ENGINES = ("native", "accelerate", "fsdp", "deepspeed")
_PARTS = f"of families that are not built yet; {', '.join(FAMILIES)} read their parts from diffusers_path"
CLIP_MODES = {**{mode: mode for mode in choices_of("data.video_clip_mode")}, "none": "single_beginning"}


def key(name: str, tables: str, to: str, help: str = "", kind: Kind = "field", **remaining: Any) -> Row:
    """Make a row. tables: separated by spaces, its home first; "-" is the top level of the file."""
    return Row(
        name, kind, to, help, tables=tuple("" if table == "-" else table for table in tables.split()), **remaining
    )


def near(name: str, tables: str, to: str, help: str, kind: Kind = "field", **remaining: Any) -> Row:
    """Make a row of a key that means the nearest thing here, which is said once."""
    return key(name, tables, to, help, kind, status="nearest", **remaining)


def later(name: str, tables: str, why: str, *passes: Any) -> Row:
    """Make a row of a key that is known and not built yet: given, it is a fault, but for values that ask for nothing."""
    return key(name, tables, "", why, "any", status="later", passes=passes)


# fmt: off
KEYS: tuple[Row, ...] = (
    key("output_dir", "output -", "save.output_dir", "folder in which every run makes one of its own"),
    key("dataset", "output data -", "data.dataset_config"),
    # [training]
    key("epochs", "training -", "training.max_epochs", "epochs; with max_steps, what comes first ends the run"),
    key("max_steps", "training -", "training.max_steps"),
    key("micro_batch_size_per_gpu", "training -", "?batch",
        "samples that a device takes at once; [[resolution, batch], ...]: for the data of each resolution", "any", default=1),
    key("image_micro_batch_size_per_gpu", "training -", "?image_batch", "the same for images alone; wins", "any"),
    key("gradient_accumulation_steps", "training -", "training.accumulation"),
    key("gradient_clipping", "training -", "training.max_grad_norm"),
    key("warmup_steps", "training -", "optimizer.warmup_steps"),
    key("lr_scheduler", "training -", "optimizer.scheduler",
        "schedule of the rate: constant (after the warm-up), linear, cosine, or another of docs/optimizers.md"),
    key("force_constant_lr", "training -", "?constant_lr",
        "this rate, constant, without a warm-up; a resume takes it too", "number"),
    key("seed", "training -", "training.seed"),
    key("train_type", "model training -", "model.train_type"),
    key("training_type", "model training -", "model.train_type", "the same as train_type"),
    key("master_weights", "training", "?masters",
        "true: fp32 master weights; false: trained weights in dtype only; or fp32, kahan, "
        "stochastic, none", "any", default=True),
    # [model]
    key("type", "model", "?family", f"what is trained: {', '.join(FAMILIES)}", "str", choices=tuple(FAMILIES)),
    key("diffusers_path", "model", "model.pretrained", "the model: a folder in diffusers' layout, or a hub id"),
    key("checkpoint_path", "model", "model.pretrained", "the model as one file, in its original layout"),
    key("vae", "model", "model.vae"),
    key("vae_path", "model", "model.vae", "the same as vae"),
    key("dtype", "model", "training.mixed_precision",
        "what is computed in: bfloat16, float16, float32; trained weights stay fp32, see master_weights", words=MIXED),
    key("transformer_dtype", "model", "?held",
        "what weights of the denoiser that are not trained are kept in", "str", words=STORAGE_DTYPES),
    key("diffusion_model_dtype", "model", "?held", "the same as transformer_dtype", "str", words=STORAGE_DTYPES),
    key("unet_dtype", "model", "?held", "the same as transformer_dtype", "str", words=STORAGE_DTYPES),
    key("num_layers", "model", "model.num_layers"),
    key("timestep_sample_method", "model", "flow.timestep_sample_method"),
    key("sigmoid_scale", "model", "flow.sigmoid_scale"),
    key("mode_scale", "model", "flow.mode_scale"),
    key("shift", "model", "flow.shift"),
    key("flux_shift", "model", "flow.flux_shift"),
    key("min_t", "model", "flow.min_t"),
    key("max_t", "model", "flow.max_t"),
    key("t5_max_length", "model", "model.t5_max_length"),
    key("llm_max_length", "model", "model.llm_max_length"),
    key("unet_lr", "model", "optimizer.unet_lr"),
    key("text_encoder_1_lr", "model", "?te1", "rate of a UNet's first text encoder; above 0 trains all of them", "number"),
    key("text_encoder_2_lr", "model", "?te2", "rate of SDXL's second text encoder; above 0 trains both", "number"),
    key("v_pred", "model", "model.prediction_type",
        "v-prediction, where noise is learnt over discrete steps", words={True: "v_prediction", False: "epsilon"}),
    key("min_snr_gamma", "loss model", "loss.min_snr_gamma"),
    key("debiased_estimation_loss", "loss model", "loss.debiased_estimation"),
    key("cache_text_embeddings", "cache model", "cache.text_to_disk"),
    key("guidance", "model", "model.guidance"),
    key("expert", "model", "model.expert"),
    key("first_frame_conditioning_p", "model", "model.first_frame_conditioning_p"),
    key("transformer_path", "model", "model.transformer"),
    key("diffusion_model", "model", "model.transformer", "the same as transformer_path"),
    key("text_encoders", "model", "?text_encoders",
        "text encoders from elsewhere: [{type = 't5', path = 'FOLDER'}, ...]; types clip_l, clip_g, t5, umt5, llm",
        "any"),
    key("t5_path", "model", "?t5_path", "the same for T5 alone", "str"),
    key("clip_path", "model", "?clip_path", "the same for CLIP alone, of a family with one of it", "str"),
    key("llm_path", "model", "?llm_path", "the same for a language model alone", "str"),
    key("llama3_path", "model", "?llm_path", "the same as llm_path", "str"),
    key("text_encoder_path", "model", "?text_encoder_path", "the same for the family's first text encoder", "str"),
    *(later(name, "model", _PARTS, "") for name in (
        "ckpt_path", "unet_path", "umt5_path", "qwen_path", "single_file_path",
    )),
    # [optimizer]
    key("type", "optimizer", "optimizer.type"),
    key("lr", "optimizer", "optimizer.learning_rate"),
    key("gradient_release", "optimizer", "optimizer.fused_backward"),
    key("beta2_half_life", "optimizer", "?half_life",
        "samples in which the average of squared gradients halves: beta2 = 0.5 ^ (samples of a step / this)", "number"),
    # [adapter]
    near("dtype", "adapter", "", "an adapter's weights are kept in fp32 and compute in [model] dtype; save_dtype is that of exports",
        "str", passes=("float32",)),
    # [optimization]
    key("activation_checkpointing", "optimization -", "?checkpointing",
        "true: less memory, one more forward pass; 'unsloth': what is kept waits in host memory", "any", default=False),
    key("checkpoint_blocks", "optimization -", "training.checkpoint_blocks"),
    near("reentrant_activation_checkpointing", "optimization -", "",
        "no effect: checkpoints are not reentrant, which every part that is built can do", "bool", passes=(False,)),
    key("swap_blocks", "memory optimization -", "memory.swap_blocks"),
    key("memory_gib", "memory -", "memory.memory_gib"),
    key("blocks_to_swap", "optimization -", "memory.swap_blocks", "the same as [memory] swap_blocks"),
    near("disable_block_swap_for_eval", "optimization eval -", "",
        "no effect: evaluation keeps to the memory of training", "bool", passes=(False,)),
    key("compile", "optimization -", "training.compile"),
    key("pipeline_stages", "optimization -", "training.pipeline_stages"),
    key("sequence_parallel", "engine optimization -", "training.sequence_parallel"),
    key("pipeline_schedule", "optimization -", "training.pipeline_schedule"),
    key("partition_method", "optimization -", "training.partition_method"),
    key("partition_split", "optimization -", "training.partition_split"),
    # [eval]
    key("eval_datasets", "eval -", "?eval_sets",
        "sets whose loss is measured: [{name = '...', config = 'FILE.toml'}, ...]", "any"),
    key("eval_every_n_epochs", "eval -", "eval.every_n_epochs"),
    key("eval_every_n_steps", "eval -", "eval.every_n_steps"),
    key("eval_every_n_examples", "eval -", "eval.every_n_examples"),
    key("eval_before_first_step", "eval -", "eval.before_first_step"),
    key("eval_micro_batch_size_per_gpu", "eval -", "eval.batch_size"),
    key("eval_image_micro_batch_size_per_gpu", "eval -", "?image_eval_batch",
        "the same for images alone; wins", "int"),
    key("image_eval_micro_batch_size_per_gpu", "eval -", "?image_eval_batch", "the same", "int"),
    near("eval_gradient_accumulation_steps", "eval -", "",
        "no effect: measuring has no gradients, and its numbers do not depend on how samples are grouped", "int",
        passes=(1,)),
    # [save]
    key("save_every_n_epochs", "save -", "save.every_n_epochs"),
    key("save_every_n_steps", "save -", "save.every_n_steps"),
    key("save_every_n_examples", "save -", "save.every_n_examples"),
    key("checkpoint_every_n_minutes", "save -", "save.checkpoint_every_n_minutes"),
    key("checkpoint_every_n_epochs", "save -", "save.checkpoint_every_n_epochs"),
    key("save_async", "save -", "save.asynchronous"),
    key("preempt_file", "save -", "save.preempt_file"),
    key("save_dtype", "save -", "save.precision", words=STORED),
    key("resume_from_checkpoint", "save -", "?resume",
        "latest, a step, or a folder: as the option --resume_from_checkpoint", "any"),
    key("huggingface_repo", "save -", "hub.repo_id"),
    later("upload_hf_from_epoch", "save -", "all exports are sent", 0),
    # [data]
    key("num_dataloader_workers", "data -", "data.workers"),
    key("dataloader_prefetch_per_worker", "data -", "data.prefetch"),
    key("prefetch_batches_per_worker", "data -", "data.prefetch", "the same"),
    near("map_num_proc", "data cache -", "",
        "no effect: the index is made in a pass of its own; caching_num_workers is for the cache", "int"),
    key("uncond_fraction", "data -", "captions.dropout_rate"),
    key("frame_buckets", "data -", "data.frame_buckets"),
    key("framerate", "data -", "data.framerate"),
    key("video_clip_mode", "data -", "data.video_clip_mode", words=CLIP_MODES),
    key("sd3_streaming_dataset", "data -", "data.tar_order",
        "read tars and folders as streams, in a fresh order every epoch", words={True: "sequential", False: "random"}),
    key("sd3_shard_size", "data -", "data.shard_size"),
    near("sd3_manifest_timeout_sec", "data -", "", "no effect: no rank waits for a manifest of another", "number"),
    # [cache]
    key("caching_batch_size", "cache -", "?caching_batch",
        "images, and captions, that are encoded at once", "int", default=32),
    key("caching_num_workers", "cache -", "cache.workers"),
    key("caching_device", "cache -", "cache.device"),
    # [loss]
    key("pseudo_huber_c", "loss -", "?pseudo_huber", "pseudo-Huber loss sqrt(d^2 + c^2) - c", "number"),
    key("huber_delta", "loss -", "?huber_delta", "Huber loss: d^2 / 2, linear beyond this", "number"),
    key("smooth_l1_beta", "loss -", "?smooth_l1_beta", "the same over beta: linear beyond it", "number"),
    key("text_recon_gamma", "loss model -", "loss.text_recon_gamma"),
    key("text_recon_target_layer", "loss model -", "loss.text_recon_target_layer"),
    key("enable_uncond_text_dropout", "model -", "model.enable_uncond_text_dropout"),
    key("uncond_text_dropout_prob", "model -", "model.uncond_text_dropout_prob"),
    # [ema]
    key("enable", "ema", "ema.enable",
        "keep a moving average of the weights and export it too; unset: where [ema] says anything"),
    key("decay", "ema", "ema.decay"),
    key("update_every", "ema", "ema.update_every"),
    # [monitoring]
    key("enable_wandb", "monitoring -", "?wandb", "send numbers to W&B beside TensorBoard", "bool", default=False),
    key("wandb_tracker_name", "monitoring -", "?wandb_project", "its project", "str"),
    key("wandb_run_name", "monitoring -", "?wandb_run", "the run's name there", "str"),
    key("wandb_api_key", "monitoring -", "",
        "moved to the environment; better given there", "str", secret="WANDB_API_KEY"),
    key("webhook_url", "monitoring -", "",
        "address that notices of the run are sent to; better given in the environment, as DIFFTRAIN_WEBHOOK_URL", "str",
        secret="DIFFTRAIN_WEBHOOK_URL"),
    key("steps_per_print", "monitoring -", "?print_every", "steps between lines of metrics", "int"),
    key("logging_steps", "monitoring -", "?log_every", "the same; the smaller one counts", "int"),
    key("x_axis_examples", "monitoring -", "logging.x_axis_examples"),
    # [engine]
    key("type", "engine", "?engine",
        "native, accelerate or fsdp; deepspeed: not built yet, runs native and says so", "str", choices=_ENGINES),
    key("engine", "engine -", "?engine", "the same", "str", choices=_ENGINES),
    key("config", "deepspeed", "?deepspeed_config",
        "DeepSpeed's JSON, as the option --deepspeed_config", "str"),
    key("shard", "engine -", "fsdp.shard"),
    key("shard_size", "engine -", "fsdp.shard_size"),
    key("fsdp_reshard_after_forward", "engine -", "fsdp.reshard_after_forward"),
    key("fsdp_reduce", "engine -", "fsdp.reduce"),
    key("fsdp_cpu_offload", "engine -", "fsdp.cpu_offload"),
    key("device", "engine", "training.device"),
    key("threads", "engine", "training.threads"),
)
# fmt: on
_NAMED = (
    "output",
    "model",
    "training",
    "optimization",
    "optimizer",
    "adapter",
    "data",
    "cache",
    "loss",
    "ema",
    "eval",
    "save",
    "monitoring",
    "engine",
)  # fmt: skip
# the canonical ones first
TABLES = (*_NAMED, *(name for name in TrainConfig.model_fields if name not in _NAMED))
_AT = {(table, row.name): row for row in KEYS for table in row.tables}


def key_at(table: str, name: str) -> Row | None:
    """Return the key of a name in a table, or in the one that it may be swapped with."""
    match = _AT.get((table, name))
    return match if match is not None or table not in SWAPPED else _AT.get((SWAPPED[table], name))


def key_of(path: str) -> Row | None:
    """Return the key that is written for a field, or nothing where that is [section] field."""
    return next((row for row in KEYS if row.to == path and row.status == "offered"), None)


def home_of(name: str) -> str:
    """Say where a key of this name belongs, or nothing where there is none."""
    homes = dict.fromkeys(row.home for row in KEYS if row.name == name and row.home)
    return " or ".join(f"in [{home}]" for home in homes)
