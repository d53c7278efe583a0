"""Every section of the configuration: typed, strict, one class a section.

Field names are the ones users see in TOML; `flags.py` maps kohya's spelling onto them. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from difftrain.config.schema.data import (
    CacheSection,
    CaptionSection,
    DataSection,
    DatasetSection,
    EvalSection,
    EvalSetSection,
    PictureSection,
    SizeSection,
    SubsetSection,
    ValidationSection,
)
from difftrain.config.schema.objective import (
    EmaSection,
    FlowSection,
    LossSection,
    NoiseSection,
    PatchMaskingSection,
    RepaSection,
    TreadSection,
)
from difftrain.config.schema.section import IntOrShare, NonNegative, PositiveInt, Section, Share
from difftrain.models.registry import DEFAULT, FAMILIES

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]  # the choices are those of the rows

__all__ = [
    "CacheSection",
    "CaptionSection",
    "DataSection",
    "DatasetSection",
    "DeepSpeedSection",
    "DemoSection",
    "EmaSection",
    "EvalSection",
    "EvalSetSection",
    "FlowSection",
    "HubSection",
    "LoggingSection",
    "LossSection",
    "MetadataSection",
    "ModelSection",
    "NoiseSection",
    "OptimizerSection",
    "PatchMaskingSection",
    "PictureSection",
    "RepaSection",
    "SampleSection",
    "SaveSection",
    "Section",
    "SizeSection",
    "SubsetSection",
    "TrainConfig",
    "TrainingSection",
    "TreadSection",
    "ValidationSection",
]


class ModelSection(Section):
    """Which model, from where."""

    family: FamilyName = DEFAULT
    train_type: Literal["normal_training", "sd3_light_pretrain"] = "normal_training"
    num_layers: PositiveInt | None = Field(
        None, description="joint blocks; unset: those of the weights, 15 in SD3-Light"
    )
    init_from_config: str | None = Field(None, description="random weights: a size by name, or a JSON file")
    pretrained: str | None = Field(None, description="diffusers folder or single .safetensors/.ckpt file")
    vae: str | None = None
    transformer: str | None = Field(
        None, description="the transformer from elsewhere: its folder, a whole model's, or one file"
    )
    text_encoder1: str | None = Field(
        None, description="the family's first text encoder from elsewhere: its folder, or a whole model's"
    )
    text_encoder2: str | None = Field(None, description="the same for its second")
    text_encoder3: str | None = Field(None, description="the same for its third")
    tokenizer1: str | None = None
    tokenizer2: str | None = None
    tokenizer3: str | None = Field(None, description="folder of the third tokenizer (T5), or a hub id")
    t5_max_length: PositiveInt = 256
    guidance: NonNegative = Field(1.0, description="what a guidance-distilled model is told that it is guided by")
    t5_attention_mask: bool = Field(False, description="T5 reads with the mask; rows at its pad positions are zeros")
    enable_uncond_text_dropout: bool = Field(
        False, description="zeros in place of a text encoder's outputs, drawn for each"
    )
    uncond_text_dropout_prob: Share = 0.464
    train_only: tuple[str, ...] = Field(
        (), description="regular expressions: parameters of the denoiser that are trained; the others are only held"
    )
    tokenizer_cache_dir: str | None = Field(None, description="where tokenizers fetched from a hub are kept")
    max_token_length: Literal[75, 77, 150, 225] = 77
    clip_skip: PositiveInt | None = Field(None, description="hidden_states[-n] of both text encoders; unset: 2, SDXL's")
    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    train_text_encoder: bool = False
    vae_fp32: bool = Field(True, description="the VAE computes in fp32; false: in the mixed precision")
    vae_batch_size: PositiveInt | None = None
    fp8_frozen: Literal["all", "unet"] | None = Field(None, description="frozen layers, but the VAE's, in 8 bits")
    disable_mmap: bool = Field(False, description="read weights without a memory map, for network disks")


class TrainingSection(Section):
    """Batch arithmetic, length, precision and memory."""

    batch_size: PositiveInt = Field(1, description="images a rank takes in one micro batch")
    accumulation: PositiveInt = 1
    max_steps: PositiveInt = 1600
    max_epochs: PositiveInt | None = None  # wins over max_steps
    first_limit: bool = Field(False, description="of max_epochs and max_steps what comes first ends the run")
    only_warn: bool = Field(
        False, description="data that changed since a checkpoint, and too many rejected, are no faults"
    )
    initial_step: Annotated[int, Field(ge=0)] = Field(0, description="steps of the data that a fresh run leaves out")
    initial_epoch: PositiveInt = Field(1, description="the epoch, counted from 1, in which a fresh run begins")
    skip_until_initial_step: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # None: drawn once, printed and kept
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    full_precision: Literal["fp16", "bf16"] | None = Field(
        None, description="weights and gradients in half precision too"
    )
    master_weights: Literal["fp32", "kahan", "stochastic", "none"] | None = Field(
        None, description="what is kept beside half weights; unset: kahan in bf16, none in fp16"
    )
    gradient_checkpointing: bool = False
    cpu_offload_checkpointing: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    max_grad_norm: NonNegative = 1.0  # 0: no clipping
    fused_attention: bool = Field(False, description="fused attention on NPU; elsewhere it says which is used")
    attention: Literal["auto", "xformers", "sdpa", "mem_eff"] = "auto"
    max_skipped_steps: PositiveInt = Field(10, description="non-finite steps in a row before the run stops")
    engine: Literal["native", "accelerate"] = "native"
    device: str = Field("auto", description="auto, or a device kind that device/ knows")
    threads: PositiveInt | None = None
    ddp_timeout_min: PositiveInt | None = None
    ddp_bucket_view: bool = False
    ddp_static_graph: bool = False
    performance: bool = Field(False, description="a speed run: named _perf in CaseName.log")


class DeepSpeedSection(Section):
    """DeepSpeed's ZeRO through accelerate's plugin: what is cut over the ranks, and what waits off the device."""

    enable: bool = False
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="1: optimizer state; 2: and gradients; 3: and weights")
    offload_optimizer_device: Literal["cpu", "nvme"] | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_device: Literal["cpu", "nvme"] | None = None
    offload_param_nvme_path: str | None = None
    zero3_init: bool = Field(False, description="cut weights before they are brought to the device")
    zero3_save_16bit: bool = Field(False, description="exports hold the half weights, not their fp32 values")
    fp16_master_weights: bool = False


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    type: str = "AdamW"  # a name of names.py in any case, or package.module.Class
    learning_rate: NonNegative = 2e-6
    learning_rate_te1: NonNegative | None = None
    learning_rate_te2: NonNegative | None = None
    unet_lr: NonNegative | None = None  # None: learning_rate
    text_encoder_lr: tuple[NonNegative, ...] = ()  # one for both encoders, or one for each
    block_lr: tuple[NonNegative, ...] = ()  # one for each block of the UNet
    args: tuple[str, ...] = ()  # key=value, literals
    scheduler: str = "constant"
    scheduler_type: str = ""  # package.module.Class
    scheduler_args: tuple[str, ...] = ()
    warmup_steps: IntOrShare = 0
    decay_steps: IntOrShare = 0
    num_cycles: PositiveInt = 1
    power: float = 1.0
    timescale: PositiveInt | None = None
    min_lr_ratio: Share | None = None
    fused_backward: bool = Field(False, description="update each parameter as its gradient comes, and free that")
    fused_groups: PositiveInt | None = Field(None, description="the same, in about so many groups")
    schedulefree_wrapper: bool = False
    schedulefree_wrapper_args: tuple[str, ...] = ()  # key=value, literals


class SaveSection(Section):
    """What is written, when, and how much of it is kept."""

    output_dir: str | None = None
    output_name: str = "last"
    model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = None
    precision: Literal["float", "fp16", "bf16"] | None = None
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    every_n_examples: PositiveInt | None = None
    checkpoint_every_n_minutes: Annotated[float, Field(gt=0)] | None = None
    checkpoint_every_n_epochs: PositiveInt | None = None
    naming: Literal["kohya", "steps"] = Field("kohya", description="steps: epochN/ stepN/ and global_stepN/")
    run_dirs: bool = Field(False, description="every run in a folder of output_dir, named by its start in UTC")
    n_epoch_ratio: PositiveInt | None = None
    last_n_steps: PositiveInt | None = None
    last_n_epochs: PositiveInt | None = None
    last_n_steps_state: PositiveInt | None = None
    last_n_epochs_state: PositiveInt | None = None
    state: bool = False
    state_on_train_end: bool = False
    resume: str | None = None  # FOLDER or auto; with run_dirs latest, FOLDER or a step
    reset_dataloader: bool = Field(False, description="a resume begins an epoch anew")
    reset_optimizer: bool = Field(False, description="a resume begins with a new optimizer and schedule")
    reset_optimizer_params: bool = Field(
        False, description="a resume takes rate, decay and betas from the configuration"
    )
    no_metadata: bool = False


class HubSection(Section):
    """Where exports and states are sent to, and whether --resume names a state there."""

    repo_id: str | None = None
    repo_type: Literal["model", "dataset"] = "model"
    path_in_repo: str | None = None
    visibility: Literal["private", "public"] | None = None  # None: a new one is private, another stays as it is
    save_state: bool = False
    resume: bool = False
    async_upload: bool = False


class SampleSection(Section):
    """Pictures drawn during training."""

    prompts: str | None = None  # a .txt, .toml or .json file
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    at_first: bool = False
    test_only: bool = Field(False, description="draw once from the model as it stands, and stop")
    sampler: str = Field("ddim", description="flow models have their own: flow_euler, flow_heun")


class LoggingSection(Section):
    """Where numbers go."""

    log_every: PositiveInt = 1
    x_axis_examples: bool = Field(False, description="trackers count examples in place of steps")
    logging_dir: str | None = None
    log_with: Literal["tensorboard", "wandb", "all"] | None = None
    log_prefix: str | None = None
    tracker_name: str | None = None
    wandb_run_name: str | None = None
    tracker_config: str | None = None
    log_config: bool = False
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = None
    console_file: str | None = None
    console_simple: bool = False


class MetadataSection(Section):
    """What is written into the header of an export."""

    title: str | None = None
    author: str | None = None
    description: str | None = None
    license: str | None = None
    tags: str | None = None
    usage_hint: str | None = None
    thumbnail: str | None = None
    merged_from: str | None = None
    trigger_phrase: str | None = None
    preprocessor: str | None = None
    is_negative_embedding: str | None = None
    training_comment: str | None = None


class DemoSection(Section):
    """The embedded demo: what it trains on, and its scores."""

    dataset: Literal["shapes", "emoji"] | None = None
    score: bool = False
    make: Literal["tiny", "shapes", "emoji"] | None = Field(
        None, description="model and data that are made before training, where the folder lacks what the run names"
    )
    folder: str | None = Field(None, description="where they are made")


class TrainConfig(Section):
    """The whole resolved configuration of a training run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    captions: CaptionSection = CaptionSection()
    cache: CacheSection = CacheSection()
    training: TrainingSection = TrainingSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    optimizer: OptimizerSection = OptimizerSection()
    loss: LossSection = LossSection()
    noise: NoiseSection = NoiseSection()
    flow: FlowSection = FlowSection()
    repa: RepaSection = RepaSection()
    tread: TreadSection = TreadSection()
    patch_masking: PatchMaskingSection = PatchMaskingSection()
    ema: EmaSection = EmaSection()
    validation: ValidationSection = ValidationSection()
    eval: EvalSection = EvalSection()
    save: SaveSection = SaveSection()
    hub: HubSection = HubSection()
    sample: SampleSection = SampleSection()
    logging: LoggingSection = LoggingSection()
    metadata: MetadataSection = MetadataSection()
    demo: DemoSection = DemoSection()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the images that a rank takes in one micro batch, of each data set."""
        return tuple(each.batch_size for each in self.data.datasets) or (self.training.batch_size,)

    @property
    def export_precision(self) -> Literal["float", "fp16", "bf16"] | None:
        """Return what exports are rounded to: nothing keeps them as the model has them.

        DeepSpeed's model has half weights, and their values of fp32 beside them are what was trained.
        """
        zero = self.deepspeed.enable and not self.deepspeed.zero3_save_16bit
        return self.save.precision or ("float" if zero and self.training.mixed_precision != "no" else None)

    @property
    def output_dir(self) -> Path:
        """Return the output folder; refused earlier where it is missing."""
        return Path(self.save.output_dir or ".")
