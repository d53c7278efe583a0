"""Every section of the configuration: typed, strict, one class a section.

Field names are the ones users see in TOML; `flags.py` maps kohya's spelling onto them. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
IntOrShare = Annotated[float, Field(ge=0)]  # below 1 and written as a float: a share of all steps
CacheDtype = Literal["fp32", "bf16", "fp16", "fp8"]
EmaWidth = Annotated[float, Field(ge=0.001, le=0.28)]  # a flat average has 0.2887


class Section(BaseModel):
    """Refuse unknown keys; every section is frozen once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which model, from where."""

    family: Literal["sdxl"] = "sdxl"
    init_from_config: str | None = Field(None, description="random weights: base, tiny, demo or a JSON file")
    pretrained: str | None = Field(None, description="diffusers folder or single .safetensors/.ckpt file")
    vae: str | None = None
    tokenizer1: str | None = None
    tokenizer2: str | None = None
    tokenizer_cache_dir: str | None = Field(None, description="where tokenizers fetched from a hub are kept")
    max_token_length: Literal[75, 77, 150, 225] = 77
    clip_skip: PositiveInt | None = Field(None, description="hidden_states[-n] of both text encoders; unset: 2, SDXL's")
    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    train_text_encoder: bool = False
    vae_fp32: bool = Field(True, description="the VAE computes in fp32; false: in the mixed precision")
    vae_batch_size: PositiveInt | None = None
    fp8_frozen: Literal["all", "unet"] | None = Field(None, description="frozen layers, but the VAE's, in 8 bits")
    disable_mmap: bool = Field(False, description="read weights without a memory map, for network disks")


class CaptionSection(Section):
    """How the caption of a draw is made from a record's caption."""

    extension: str | None = None  # None: .caption, then .txt
    separator: str = ","
    shuffle: bool = False
    keep_tokens: Annotated[int, Field(ge=0)] = 0
    keep_tokens_separator: str | None = None
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    prefix: str | None = None
    suffix: str | None = None
    token_warmup_min: Annotated[int, Field(ge=0)] = 1
    token_warmup_step: IntOrShare = 0
    weighted: bool = False
    dropout_rate: Share = 0.0
    dropout_every_n_epochs: Annotated[int, Field(ge=0)] = 0
    tag_dropout_rate: Share = 0.0
    allow_empty: bool = False


class SizeSection(Section):
    """Which shapes pictures get."""

    resolution: tuple[PositiveInt, PositiveInt] | None = None  # width, height as kohya spells it
    enable_bucket: bool = False
    min_bucket_reso: PositiveInt = 256
    max_bucket_reso: PositiveInt = 1024
    bucket_reso_steps: PositiveInt = 64
    bucket_no_upscale: bool = False


class PictureSection(Section):
    """How a picture becomes pixels, and what masks its loss."""

    resize_interpolation: Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area"] | None = None
    flip: bool = False
    random_crop: bool = False
    color_aug: bool = False
    face_crop_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = None
    alpha_mask: bool = False
    conditioning_dir: str | None = Field(None, description="masks of the loss, by the pictures' names")


class SubsetSection(PictureSection):
    """One source of a data set, every setting resolved: a table of [[datasets.subsets]], or a folder of the flags."""

    image_dir: str | None = None
    metadata_file: str | None = None  # kohya's json: captions and tags by picture
    dataset_class: str | None = None  # package.module.Class
    is_reg: bool = False
    class_tokens: str | None = None  # the caption of pictures without a caption file
    repeats: PositiveInt = 1
    flat: bool = Field(False, description="only what lies in the folder itself, as in kohya's image_dir")
    custom_attributes: dict[str, Any] = Field({}, description="the user's own words, kept with the run")
    captions: CaptionSection = CaptionSection()


class DatasetSection(SizeSection):
    """One table of [[datasets]], every setting resolved: sources that share buckets and a batch size."""

    batch_size: PositiveInt = 1
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    subsets: tuple[SubsetSection, ...] = ()


class DataSection(SizeSection, PictureSection):
    """Where samples come from and which shape they get."""

    dirs: tuple[str, ...] = ()
    repeats: tuple[PositiveInt, ...] = (1,)
    reg_dirs: tuple[str, ...] = ()
    in_json: str | None = None
    dataset_class: str | None = None  # package.module.Class
    dataset_config: str | None = None  # the file that `datasets` came from
    tar_order: Literal["random", "sequential"] = "random"
    tar_streams: PositiveInt = 64
    tar_window: PositiveInt = Field(4, description="shards whose records are shuffled together")
    image_column: str | None = None
    caption_column: str | None = None
    verify: Literal["auto", "full", "quick"] = "auto"
    max_rejected_share: Share = 0.5
    workers: Annotated[int, Field(ge=0)] = 8
    image_decoder: Literal["host", "device"] = Field("host", description="device: of JPEG, by torchvision_npu")
    cache_dir: str | None = None
    datasets: tuple[DatasetSection, ...] = ()  # in place of the folders above


class CacheSection(Section):
    """What is encoded once, at the start, and read from then on."""

    latents: bool = Field(False, description="in memory, for the length of the run")
    latents_to_disk: bool = Field(False, description="in the cache's folder, for other runs too")
    text: bool = Field(False, description="outputs of frozen text encoders: in memory")
    text_to_disk: bool = False
    latents_as: Literal["moments", "mean", "sample"] = Field("moments", description="moments: every use draws anew")
    latents_dtype: CacheDtype = "fp32"
    text_dtype: Literal["auto", CacheDtype] = Field("auto", description="auto: what the encoder computes in")
    dtypes: dict[str, str] = Field({}, description="feature -> CacheDtype, for one feature; wins")
    shuffle_num: PositiveInt | None = Field(None, description="captions that are drawn of a record, once")
    skip_check: bool = Field(False, description="checksums are not compared where entries are read first")
    trust: bool = Field(False, description="the index and the list of what is cached are taken as they are")
    regenerate: bool = Field(False, description="encode all of this run's entries anew")
    only: bool = Field(False, description="stop when the cache is whole")
    preload: bool = Field(False, description="copy a cache on disk into memory that all processes share")
    batch_size: PositiveInt = Field(32, description="captions that a text encoder takes at once")
    workers: Annotated[int, Field(ge=0)] | None = Field(None, description="while building; None: data.workers")
    segment_gib: Annotated[float, Field(gt=0)] = Field(1.0, description="size at which the next segment is begun")
    copy_gib: Annotated[float, Field(gt=0)] = Field(50.0, description="bound of what is kept of an object store")


class TrainingSection(Section):
    """Batch arithmetic, length, precision and memory."""

    batch_size: PositiveInt = Field(1, description="images a rank takes in one micro batch")
    accumulation: PositiveInt = 1
    max_steps: PositiveInt = 1600
    max_epochs: PositiveInt | None = None  # wins over max_steps
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
    fused_attention: bool = Field(False, description="--enable_npu_flash_attention")
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


class LossSection(Section):
    """How an error is measured, and what a sample's weighs."""

    type: Literal["l1", "l2", "huber", "smooth_l1"] = "l2"
    huber_schedule: Literal["constant", "exponential", "snr"] = "snr"
    huber_c: Annotated[float, Field(gt=0)] = 0.1
    huber_scale: Annotated[float, Field(gt=0)] = 1.0
    masked: bool = Field(False, description="masks of data.conditioning_dir count; those of alpha_mask always do")
    prior_weight: NonNegative = Field(1.0, description="what a regularisation picture's loss is multiplied by")
    min_snr_gamma: NonNegative | None = None  # 0: off, here and below
    scale_v_pred_like_noise_pred: bool = False
    v_pred_like: NonNegative | None = None
    debiased_estimation: bool = False


class NoiseSection(Section):
    """What is mixed into the latents, and how far."""

    offset: NonNegative | None = None  # 0: off, as with every strength here
    offset_random_strength: bool = False
    adaptive_scale: float | None = None
    multires_iterations: Annotated[int, Field(ge=0)] | None = None
    multires_discount: NonNegative = 0.3
    ip_gamma: NonNegative | None = None
    ip_gamma_random_strength: bool = False
    zero_terminal_snr: bool = False
    min_timestep: Annotated[int, Field(ge=0, le=999)] | None = None
    max_timestep: Annotated[int, Field(ge=1, le=1000)] | None = None


class EmaSection(Section):
    """A moving average of the trained weights."""

    enable: bool = False
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    profiles: tuple[EmaWidth, ...] = Field((), description="relative widths of power-function averages")
    snapshot_precision: Literal["float", "fp16"] = "fp16"


class ValidationSection(Section):
    """Loss on records that are never trained on, with fixed draws."""

    split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: int | None = None
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None


class SaveSection(Section):
    """What is written, when, and how much of it is kept."""

    output_dir: str | None = None
    output_name: str = "last"
    model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = None
    precision: Literal["float", "fp16", "bf16"] | None = None
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    n_epoch_ratio: PositiveInt | None = None
    last_n_steps: PositiveInt | None = None
    last_n_epochs: PositiveInt | None = None
    last_n_steps_state: PositiveInt | None = None
    last_n_epochs_state: PositiveInt | None = None
    state: bool = False
    state_on_train_end: bool = False
    resume: str | None = None  # FOLDER or auto
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
    sampler: str = "ddim"


class LoggingSection(Section):
    """Where numbers go."""

    log_every: PositiveInt = 1
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
    ema: EmaSection = EmaSection()
    validation: ValidationSection = ValidationSection()
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
