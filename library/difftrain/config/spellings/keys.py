"""The one table of train.py's keys: the sectioned spelling, the flat one of diffusion-pipe, and where each leads.

Every row says what the key sets, or why it is not offered. Reading, --help, docs/train_toml.md and the tests take it from
here. A field of sections.py without a row is spelt [section] field. What is no key is an option of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import show
from difftrain.models.registry import TRAINED

Kind = Literal["field", "bool", "int", "number", "str", "any"]
Status = Literal["offered", "nearest", "later"]

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "str": ((str,), "text in quotes"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    tables: where it may stand, its home first; "" is the top level of the file. to: "section.field" that it sets, or
    "?name" of something that is settled when all is read. kind: "field" is whatever the field takes. words: a value as
    it is spelt here -> the field's. passes: values that ask for what is done anyway, so that nothing is said.
    secret: the environment variable that its value moves to. help: its meaning, or why it is not offered.
    """

    name: str
    tables: tuple[str, ...]
    to: str
    help: str
    kind: Kind = "field"
    status: Status = "offered"
    words: Mapping[Any, Any] = field(default_factory=dict)
    passes: tuple[Any, ...] = ()
    secret: str = ""

    @property
    def home(self) -> str:
        """Return the table in which we write it."""
        return next((table for table in self.tables if table), "")

    @property
    def option(self) -> str:
        """Return how the command line spells it."""
        return f"--{self.home}.{self.name}" if self.home else f"--{self.name}"

    @property
    def place(self) -> str:
        """Return how a file spells it."""
        return f"[{self.home}] {self.name}" if self.home else self.name


def misfit(key: Key, value: Any) -> str:
    """Say what is wrong with a value's type, or nothing; a field's own type is judged with the field."""
    if key.kind in ("field", "any"):
        return ""
    types, needed = _KINDS[key.kind]
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return ""
    return f"must be {needed}, got {show(value)}"


LATEST = "latest"


class Option(NamedTuple):
    """One option. to: the field that it sets, to true or to its value. takes: the name of its value, [in brackets] if optional."""

    help: str
    to: str = ""
    takes: str = ""


OPTIONS: dict[str, Option] = {
    "config": Option("TOML file of the run", takes="FILE"),
    "dataset": Option("the same as --output.dataset", "data.dataset_config", "FILE"),
    "resume_from_checkpoint": Option(
        "go on from the newest whole checkpoint below output_dir, from the one of a step, or from a folder",
        "save.resume", "[FOLDER|STEP]"),
    "reset_dataloader": Option("a resume begins an epoch anew", "save.reset_dataloader"),
    "reset_optimizer": Option("a resume begins with a new optimizer and schedule", "save.reset_optimizer"),
    "reset_optimizer_params": Option(
        "a resume takes rate, decay and betas from the configuration", "save.reset_optimizer_params"),
    "cache_only": Option("build the cache, and stop", "cache.only"),
    "trust_cache": Option(
        "list, look at and hash no file of the data: index and cache are taken as they are; fingerprints of the encoders "
        "and checksums still count", "cache.trust"),
    "regenerate_cache": Option("encode everything that this run reads from its cache anew", "cache.regenerate"),
    "i_know_what_i_am_doing": Option(
        "two faults become warnings: the data changed since the checkpoint that a resume goes on from, and a larger share "
        "of the data than data.max_rejected_share is rejected", "training.only_warn"),
    "test_sample": Option(
        "draw the pictures of sample.prompts once, from the model as it stands or as it is resumed, and stop",
        "sample.test_only"),
    "dump_dataset": Option("write every sample of the first epoch, as training sees it, and stop", takes="DIR"),
    "dry_run": Option("print configuration, steps, memory and FLOP estimates; touch no device"),
    "deepspeed": Option("for command lines that have it: runs natively, and says so, unless --deepspeed_config shards"),
    "deepspeed_config": Option("DeepSpeed's JSON; with a zero stage of 1 to 3 the run is sharded by accelerate's plugin", takes="FILE"),
    "local_rank": Option("handed over by launchers; taken where the environment has no LOCAL_RANK", takes="N"),
    "master_port": Option("the same for MASTER_PORT", takes="N"),
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
HELD = {
    **{name: name for name in ("bfloat16", "float16", "float32")},
    **dict.fromkeys(("float8", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"), "float8"),
}  # fmt: skip
_STAGES = "the pipeline engine"
_SWAP = "blocks wait in host memory; activation_checkpointing = true saves most of the same memory"
_PARTS = f"of families that are not built yet; {', '.join(TRAINED)} read their parts from diffusers_path"
_CLIPS = "clips of videos: no family that is built has them, and pictures are taken as they are"


def on(name: str, tables: str, to: str, help: str, kind: Kind = "field", **rest: Any) -> Key:
    """Make a row. tables: separated by spaces, its home first; "-" is the top level of the file."""
    return Key(name, tuple("" if table == "-" else table for table in tables.split()), to, help, kind, **rest)


def near(name: str, tables: str, to: str, help: str, kind: Kind = "field", **rest: Any) -> Key:
    """Make a row of a key that means the nearest thing here, which is said once."""
    return on(name, tables, to, help, kind, status="nearest", **rest)


def later(name: str, tables: str, why: str, *passes: Any) -> Key:
    """Make a row of a key that is known and not built yet: given, it is a fault, but for values that ask for nothing."""
    return on(name, tables, "", why, "any", status="later", passes=passes)


# fmt: off
KEYS: tuple[Key, ...] = (
    on("output_dir", "output -", "save.output_dir", "folder in which every run makes one of its own"),
    on("dataset", "output data -", "data.dataset_config", "TOML file of the data: diffusion-pipe's, or kohya's"),
    # [training]
    on("epochs", "training -", "training.max_epochs", "epochs; with max_steps, what comes first ends the run"),
    on("max_steps", "training -", "training.max_steps", "updates of the weights"),
    on("micro_batch_size_per_gpu", "training -", "?batch",
       "samples that a card takes at once; [[resolution, batch], ...]: for the data of each resolution", "any"),
    on("image_micro_batch_size_per_gpu", "training -", "?image_batch", "the same for pictures alone; wins", "any"),
    on("gradient_accumulation_steps", "training -", "training.accumulation", "micro batches of one update"),
    on("gradient_clipping", "training -", "training.max_grad_norm", "bound of the gradients' norm; 0: none"),
    on("warmup_steps", "training -", "optimizer.warmup_steps", "updates in which the rate grows; below 1: a share of all"),
    on("lr_scheduler", "training -", "optimizer.scheduler",
       "schedule of the rate: constant (behind the warm-up), linear, cosine, or another of docs/optimizers.md"),
    on("force_constant_lr", "training -", "?constant_lr",
       "this rate, constant, without a warm-up; a resume takes it too", "number"),
    on("seed", "training -", "training.seed", "seed of every draw; unset: drawn once and printed"),
    on("train_type", "model training -", "model.train_type",
       "normal_training: weights go on; sd3_light_pretrain: SD3-Light's depth, from random weights"),
    on("training_type", "model training -", "model.train_type", "the same as train_type"),
    on("master_weights", "training", "?masters",
       "true: fp32 weights beside what is computed with; false: trained weights in dtype alone; or fp32, kahan, "
       "stochastic, none", "any"),
    # [model]
    on("type", "model", "?family", f"what is trained: {', '.join(TRAINED)}", "str"),
    on("diffusers_path", "model", "model.pretrained", "the model: a folder in diffusers' layout, or a hub id"),
    on("checkpoint_path", "model", "model.pretrained", "the model as one file, in SDXL's original layout"),
    on("vae", "model", "model.vae", "another VAE: a folder of diffusers, a file, or a hub id"),
    on("vae_path", "model", "model.vae", "the same as vae"),
    on("dtype", "model", "training.mixed_precision",
       "what is computed in: bfloat16, float16, float32; trained weights stay fp32, see master_weights", words=MIXED),
    on("transformer_dtype", "model", "?held", "what weights of the denoiser that are not trained are kept in", "str", words=HELD),
    on("diffusion_model_dtype", "model", "?held", "the same as transformer_dtype", "str", words=HELD),
    on("unet_dtype", "model", "?held", "the same as transformer_dtype", "str", words=HELD),
    on("num_layers", "model", "model.num_layers", "joint blocks; unset: those of the weights, 15 in SD3-Light"),
    on("timestep_sample_method", "model", "flow.timestep_sample_method", "how the time of a flow is drawn"),
    on("sigmoid_scale", "model", "flow.sigmoid_scale", "width of logit_normal: t = sigmoid(scale * normal)"),
    on("mode_scale", "model", "flow.mode_scale", "scale of mode"),
    on("shift", "model", "flow.shift", "t <- s t / (1 + (s - 1) t)"),
    on("flux_shift", "model", "flow.flux_shift", "the shift follows the number of latent tokens"),
    on("min_t", "model", "flow.min_t", "lowest time that is trained"),
    on("max_t", "model", "flow.max_t", "highest time that is trained"),
    on("t5_max_length", "model", "model.t5_max_length", "tokens that T5 reads"),
    on("unet_lr", "model", "optimizer.unet_lr", "rate of SDXL's UNet; 0: frozen"),
    on("text_encoder_1_lr", "model", "?te1", "rate of SDXL's first text encoder; above 0 trains both", "number"),
    on("text_encoder_2_lr", "model", "?te2", "rate of SDXL's second text encoder; above 0 trains both", "number"),
    on("v_pred", "model", "model.prediction_type", "v-prediction (SDXL)", words={True: "v_prediction", False: "epsilon"}),
    on("min_snr_gamma", "loss model", "loss.min_snr_gamma", "min-SNR weights with this gamma (SDXL); 0: off"),
    on("debiased_estimation_loss", "loss model", "loss.debiased_estimation", "weigh by 1 / sqrt(SNR) (SDXL)"),
    on("cache_text_embeddings", "cache model", "cache.text_to_disk", "encode every caption once"),
    on("guidance", "model", "model.guidance", "what a guidance-distilled model is told that it is guided by (Flux.1)"),
    on("transformer_path", "model", "model.transformer", "the transformer from elsewhere: its folder, a whole model's, or one file of its original layout"),
    on("diffusion_model", "model", "model.transformer", "the same as transformer_path"),
    on("text_encoders", "model", "?text_encoders",
       "text encoders from elsewhere: [{type = 't5', path = 'FOLDER'}, ...]; types clip_l, clip_g, t5, umt5, llm", "any"),
    on("t5_path", "model", "?t5_path", "the same for T5 alone", "str"),
    on("clip_path", "model", "?clip_path", "the same for CLIP alone, of a family with one of it", "str"),
    on("llm_path", "model", "?llm_path", "the same for a language model alone", "str"),
    on("text_encoder_path", "model", "?text_encoder_path", "the same for the family's first text encoder", "str"),
    *(later(name, "model", _PARTS, "") for name in (
        "ckpt_path", "unet_path", "umt5_path", "qwen_path", "llama3_path", "single_file_path",
    )),
    # [optimizer]
    on("type", "optimizer", "optimizer.type", "name of the optimizer, in any case: adamw, AdamW8bit, Prodigy, ..."),
    on("lr", "optimizer", "optimizer.learning_rate", "learning rate"),
    on("gradient_release", "optimizer", "optimizer.fused_backward", "update each parameter as its gradient comes, and free that"),
    on("beta2_half_life", "optimizer", "?half_life",
       "samples in which the average of squared gradients halves: beta2 = 0.5 ^ (samples of a step / this)", "number"),
    # [adapter]
    *(on(name, "adapter", f"?adapter.{name}", "adapters are not built yet: all weights are trained", "any") for name in (
        "type", "rank", "alpha", "dropout", "dtype", "init_from_existing", "exclude_modules", "fuse_adapters",
        "decompose_factor", "target_modules",
    )),
    # [optimization]
    on("activation_checkpointing", "optimization -", "?checkpointing",
       "true: less memory, one more forward pass; 'unsloth': what is kept waits in host memory", "any"),
    near("reentrant_activation_checkpointing", "optimization -", "",
         "no effect: checkpoints are not reentrant, which every part that is built can do", "bool", passes=(False,)),
    later("blocks_to_swap", "optimization -", _SWAP, 0),
    near("disable_block_swap_for_eval", "optimization eval -", "", "no effect: no blocks are swapped", "bool", passes=(False,)),
    on("compile", "optimization -", "training.compile", "compile the blocks of the denoiser"),
    on("pipeline_stages", "optimization -", "?stages", f"cards over which one model is cut; above 1: {_STAGES}, not built yet", "int"),
    near("partition_method", "optimization -", "", f"no effect with pipeline_stages = 1: it is for {_STAGES}", "str",
         passes=("parameters",)),
    near("partition_split", "optimization -", "", f"no effect with pipeline_stages = 1: it is for {_STAGES}", "any", passes=([],)),
    # [eval]
    on("eval_datasets", "eval -", "?eval_sets", "sets whose loss is measured: [{name = '...', config = 'FILE.toml'}, ...]", "any"),
    on("eval_every_n_epochs", "eval -", "eval.every_n_epochs", "measure every n epochs"),
    on("eval_every_n_steps", "eval -", "eval.every_n_steps", "measure every n steps"),
    on("eval_every_n_examples", "eval -", "eval.every_n_examples", "measure every n samples"),
    on("eval_before_first_step", "eval -", "eval.before_first_step", "measure before training; unset: where there are sets"),
    on("eval_micro_batch_size_per_gpu", "eval -", "eval.batch_size", "samples at once while measuring"),
    on("eval_image_micro_batch_size_per_gpu", "eval -", "?image_eval_batch", "the same for pictures alone; wins", "int"),
    on("image_eval_micro_batch_size_per_gpu", "eval -", "?image_eval_batch", "the same", "int"),
    near("eval_gradient_accumulation_steps", "eval -", "",
         "no effect: measuring has no gradients, and its numbers do not hang on how samples are grouped", "int", passes=(1,)),
    # [save]
    on("save_every_n_epochs", "save -", "save.every_n_epochs", "export every n epochs"),
    on("save_every_n_steps", "save -", "save.every_n_steps", "export every n steps"),
    on("save_every_n_examples", "save -", "save.every_n_examples", "export every n samples"),
    on("checkpoint_every_n_minutes", "save -", "save.checkpoint_every_n_minutes", "a checkpoint every so many minutes"),
    on("checkpoint_every_n_epochs", "save -", "save.checkpoint_every_n_epochs", "a checkpoint every n epochs"),
    on("save_dtype", "save -", "save.precision", "precision of exports; unset: that of the weights", words=STORED),
    on("resume_from_checkpoint", "save -", "?resume",
       "latest, a step, or a folder: as the option --resume_from_checkpoint", "any"),
    on("huggingface_repo", "save -", "hub.repo_id", "send every export to this repository of a hub"),
    later("upload_hf_from_epoch", "save -", "all exports are sent", 0),
    # [data]
    on("num_dataloader_workers", "data -", "data.workers", "processes that read samples, for each card"),
    on("dataloader_prefetch_per_worker", "data -", "data.prefetch", "steps that a worker prepares ahead"),
    on("prefetch_batches_per_worker", "data -", "data.prefetch", "the same"),
    near("map_num_proc", "data cache -", "", "no effect: the index is made in a pass of its own; caching_num_workers is for the cache",
         "int"),
    on("uncond_fraction", "data -", "captions.dropout_rate", 'share of uses with the caption "", for all encoders together'),
    on("video_clip_mode", "data -", "?clip_mode", _CLIPS, "str"),
    on("sd3_streaming_dataset", "data -", "data.tar_order", "read tars and folders as streams, in a fresh order every epoch",
       words={True: "sequential", False: "random"}),
    on("sd3_shard_size", "data -", "data.shard_size", "files of a plain folder that are one shard of a stream"),
    near("sd3_manifest_timeout_sec", "data -", "", "no effect: no rank waits for a manifest of another", "number"),
    # [cache]
    on("caching_batch_size", "cache -", "?caching_batch", "pictures, and captions, that are encoded at once", "int"),
    on("caching_num_workers", "cache -", "cache.workers", "processes that decode for a card while the cache is built"),
    on("caching_device", "cache -", "cache.device", "kind of device that encodes; unset: the one that trains"),
    # [loss]
    on("pseudo_huber_c", "loss -", "?pseudo_huber", "pseudo-Huber loss sqrt(d^2 + c^2) - c", "number"),
    on("huber_delta", "loss -", "?huber_delta", "Huber loss: d^2 / 2, linear beyond this", "number"),
    on("smooth_l1_beta", "loss -", "?smooth_l1_beta", "the same over beta: linear beyond it", "number"),
    on("text_recon_gamma", "loss model -", "loss.text_recon_gamma", "weight of text reconstruction (SD3-Light); 0: off"),
    on("text_recon_target_layer", "loss model -", "loss.text_recon_target_layer",
       "its target: 0: output of the context embedder; k: output of block k"),
    on("enable_uncond_text_dropout", "model -", "model.enable_uncond_text_dropout",
       "zeros in place of a text encoder's outputs, drawn for each"),
    on("uncond_text_dropout_prob", "model -", "model.uncond_text_dropout_prob", "how often"),
    # [ema]
    on("enable", "ema", "ema.enable", "keep a moving average of the weights and export it too; unset: where [ema] says anything"),
    on("decay", "ema", "ema.decay", "decay of one update; unset: 0.99"),
    on("update_every", "ema", "ema.update_every", "steps between two updates; unset: 100"),
    # [monitoring]
    on("enable_wandb", "monitoring -", "?wandb", "send numbers to W&B beside TensorBoard", "bool"),
    on("wandb_tracker_name", "monitoring -", "?wandb_project", "its project", "str"),
    on("wandb_run_name", "monitoring -", "?wandb_run", "the run's name there", "str"),
    on("wandb_api_key", "monitoring -", "", "moved to the environment; better given there", "str", secret="WANDB_API_KEY"),
    on("steps_per_print", "monitoring -", "?print_every", "steps between lines of metrics", "int"),
    on("logging_steps", "monitoring -", "?log_every", "the same; the smaller one counts", "int"),
    on("x_axis_examples", "monitoring -", "logging.x_axis_examples", "trackers count samples in place of steps"),
    # [engine]
    on("type", "engine", "?engine", "native or accelerate; deepspeed: not built yet, runs native and says so", "str"),
    on("engine", "engine -", "?engine", "the same", "str"),
    on("device", "engine", "training.device", "kind of device; auto: the best that is there"),
    on("threads", "engine", "training.threads", "CPU threads of a process; unset: torch's choice"),
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
_AT = {(table, key.name): key for key in KEYS for table in key.tables}


def key_at(table: str, name: str) -> Key | None:
    """Return the key of a name in a table, or in the one that it may be swapped with."""
    found = _AT.get((table, name))
    return found if found is not None or table not in SWAPPED else _AT.get((SWAPPED[table], name))


def key_of(path: str) -> Key | None:
    """Return the key that is written for a field, or nothing where that is [section] field."""
    return next((key for key in KEYS if key.to == path and key.status == "offered"), None)


def home_of(name: str) -> str:
    """Say where a key of this name belongs, or nothing where there is none."""
    homes = dict.fromkeys(key.home for key in KEYS if key.name == name and key.home)
    return " or ".join(f"in [{home}]" for home in homes)
