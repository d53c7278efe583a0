"""Sections about how training runs: batches, length, precision, what is sharded, the optimizer and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from difftrain.config.schema.names import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS
from difftrain.config.schema.section import BatchSize, IntOrShare, NonNegative, PositiveInt, Section, Share


class TrainingSection(Section):
    """Batch arithmetic, length, precision and memory."""

    # batch, length, beginning
    batch_size: BatchSize = Field(1, description="images that a device takes in one micro batch")
    image_batch_size: BatchSize | None = Field(
        None, description="the same of images among clips, whose own number is {training.batch_size}; unset: as many"
    )
    accumulation: PositiveInt = Field(1, description="micro batches in one update")
    max_steps: PositiveInt = Field(1600, description="optimizer updates")
    max_epochs: PositiveInt | None = Field(None, description="epochs")
    first_limit: bool = Field(
        False, description="of {training.max_epochs} and {training.max_steps} what comes first ends the run"
    )
    only_warn: bool = Field(
        False,
        description="two errors become warnings: the data changed since the checkpoint that a resume continues from, and"
        " a larger share of the data than {data.max_rejected_share} is rejected",
    )
    initial_step: Annotated[int, Field(ge=0)] = Field(
        0, description="steps of the data that a fresh run leaves out; the schedule begins at 0"
    )
    initial_epoch: PositiveInt = Field(1, description="epoch to begin in, the first is 1; {training.initial_step} wins")
    skip_until_initial_step: bool = Field(
        False,
        description="a fresh run begins at {training.initial_step} or {training.initial_epoch}: what the data hold"
        " before it is left out",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="seed of everything random; unset: chosen once and printed"
    )

    # precision
    mixed_precision: Literal["no", "fp16", "bf16"] = Field(
        "no",
        description="compute precision; weights stay fp32 without {training.full_precision=fp16} or"
        " {training.full_precision=bf16}",
    )
    full_precision: Literal["fp16", "bf16"] | None = Field(
        None, description="weights and gradients in half precision too, see {training.master_weights}"
    )
    master_weights: Literal["fp32", "kahan", "stochastic", "none"] | None = Field(
        None,
        description="what is kept in addition to half precision weights; unset: kahan with {training.full_precision=bf16},"
        " none with {training.full_precision=fp16}",
    )

    allow_tf32: bool = Field(
        False, description="matrix products of fp32 may be rounded to TF32 inside, on devices that have it"
    )

    # memory and speed
    gradient_checkpointing: bool = Field(False, description="less memory, one more forward pass")
    checkpoint_blocks: PositiveInt | None = Field(
        None,
        description="blocks that {training.gradient_checkpointing} computes again, evenly among all; the others keep their"
        " activations; unset: all",
    )
    cpu_offload_checkpointing: bool = Field(
        False, description="activations that {training.gradient_checkpointing} keeps wait in host memory"
    )
    compile: bool = Field(False, description="compile the blocks of the denoiser")
    compile_backend: str = Field("inductor", description="backend of {training.compile=true}")
    max_grad_norm: NonNegative = Field(1.0, description="clip the global gradient norm to this; 0: no clipping")
    fused_attention: bool = Field(
        False,
        description="fused attention on NPU, even with {training.attention=sdpa} (without that it is the default"
        " there); elsewhere it says which is used",
    )
    attention: Literal["auto", "xformers", "sdpa", "mem_eff"] = Field(
        "auto",
        description="sdpa: torch's own on an NPU, not npu_fusion_attention; the others pick no kernel here: the"
        " device's best exact attention is used",
    )
    max_skipped_steps: PositiveInt = Field(10, description="non-finite steps in a row after which the run stops")

    # what runs the steps, on what
    engine: Literal["native", "accelerate", "fsdp"] = Field(
        "native",
        description="what runs the steps; accelerate: docs/engines.md; fsdp: weights, gradients and optimizer state are"
        " sharded over the devices; unset: native, or accelerate with {deepspeed.enable=true}",
    )
    sequence_parallel: PositiveInt = Field(
        1,
        description="devices that share the tokens of each sample, and the heads of its attention (Ulysses): for long clips, whose"
        " activations fill one device",
    )
    pipeline_stages: PositiveInt = Field(1, description="devices over which one model is cut, block by block")
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zb"] = Field(
        "1f1b",
        description="order in which {training.pipeline_stages} work on the {training.accumulation} micro batches of a step;"
        " interleaved and zb: two pieces of the model on each device",
    )
    partition_method: str = Field(
        "parameters",
        description="how blocks are dealt to {training.pipeline_stages}: parameters, uniform, type:REGEX (by class), or"
        " manual, with {training.partition_split}",
    )
    partition_split: tuple[PositiveInt, ...] = Field(
        (), description="blocks, counted from 1, with which the stages behind the first one begin"
    )
    device: str = Field("auto", description="kind of device; auto: the best that is there")
    threads: PositiveInt | None = Field(None, description="CPU threads of a process; unset: torch's choice")
    ddp_timeout_min: PositiveInt | None = Field(None, description="minutes after which ranks that wait give up")
    ddp_bucket_view: bool = Field(False, description="gradients share memory with their buckets")
    ddp_static_graph: bool = Field(False, description="tell DDP that the graph never changes")
    performance: bool = Field(False, description="a speed run: named _perf in the reports")


class MemorySection(Section):
    """What of a model waits in host memory, and how much memory a device has."""

    swap_blocks: Annotated[int, Field(ge=0)] = Field(
        0,
        description="blocks of the denoiser whose weights wait in host memory, and come to the device before they run: those"
        " that are only held (adapters, {model.train_only}; at most two fewer than there are), or where all are trained with"
        " {optimizer.fused_backward} these and their optimizer state (at most three fewer)",
    )
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="memory of a device in GiB: a run that is planned to take more is refused before a device is touched, and"
        " what to turn on is said",
    )


class FsdpSection(Section):
    """FSDP2: what is sharded over which ranks, and when it is gathered and reduced."""

    shard: Literal["full", "hybrid"] | None = Field(
        None,
        description="full: one copy of the model over all devices; hybrid: a copy over each {fsdp.shard_size} devices, which"
        " gather among themselves alone; unset: full, or hybrid where {fsdp.shard_size} is given",
    )
    shard_size: PositiveInt | None = Field(
        None, description="devices that share one copy of the model; unset: with hybrid those of a machine, else all"
    )
    reshard_after_forward: Literal["always", "never"] = Field(
        "always",
        description="always: a block's weights are freed after its forward and gathered once more for its backward; never:"
        " they stay until then: less communication, more memory",
    )
    reduce: Literal["last", "each"] = Field(
        "last",
        description="micro batches of an update after which gradients are reduced: last: one reduction, and until then"
        " every device holds whole gradients; each: one a micro batch, and gradients are sharded at all times",
    )
    cpu_offload: bool = Field(
        False, description="sharded weights, gradients and optimizer state are on the host, where the update is made"
    )


class DeepSpeedSection(Section):
    """DeepSpeed's ZeRO through accelerate's plugin: what is cut over the ranks, and what waits off the device."""

    enable: bool = Field(
        False, description="ZeRO through accelerate's DeepSpeed plugin; takes {training.engine=accelerate}"
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="what is cut over the devices: 1 optimizer state, 2 gradients too, 3 weights too"
    )
    offload_optimizer_device: Literal["cpu", "nvme"] | None = Field(
        None,
        description="where optimizer state and update are, with {deepspeed.zero_stage=2} or 3; unset: on the device",
    )
    offload_optimizer_nvme_path: str | None = Field(
        None, description="folder of {deepspeed.offload_optimizer_device=nvme}"
    )
    offload_param_device: Literal["cpu", "nvme"] | None = Field(
        None, description="where weights wait with {deepspeed.zero_stage=3}; unset: on the device"
    )
    offload_param_nvme_path: str | None = Field(None, description="folder of {deepspeed.offload_param_device=nvme}")
    zero3_init: bool = Field(
        False,
        description="with {deepspeed.zero_stage=3}, shard weights on the host, so that no device ever holds all of them",
    )
    zero3_save_16bit: bool = Field(
        False,
        description="with {deepspeed.zero_stage=3}, exports hold the half weights that the model computes with, not"
        " their fp32 values",
    )
    fp16_master_weights: bool = Field(
        False,
        description="with fp16, {deepspeed.zero_stage=2} and {deepspeed.offload_optimizer_device=cpu}, masters and"
        " gradients are fp16 too",
    )


class OptimizerSection(Section):
    """The optimizer and its schedule."""

    # which, and how fast each part learns
    type: str = Field(
        "AdamW",
        description=f"{', '.join(OPTIMIZERS)} (oss: AdamW with its state sharded over ranks; Muon: with AdamW for non-matrix"
        f" parameters); of torch.optim {', '.join(TORCH_OPTIMIZERS)}; in any case; or package.module.Class",
    )
    learning_rate: NonNegative = Field(2e-6, description="learning rate")
    learning_rate_te1: NonNegative | None = Field(
        None, description="rate of text encoder 1; unset: {optimizer.learning_rate}; 0: frozen"
    )
    learning_rate_te2: NonNegative | None = Field(
        None, description="rate of text encoder 2; unset: {optimizer.learning_rate}; 0: frozen"
    )
    unet_lr: NonNegative | None = Field(
        None, description="rate of the UNet; unset: {optimizer.learning_rate}; 0: frozen"
    )
    text_encoder_lr: tuple[NonNegative, ...] = Field(
        (),
        description="rate of both text encoders, or one for each; the other spelling of {optimizer.learning_rate_te1}"
        " and {optimizer.learning_rate_te2}",
    )
    block_lr: tuple[NonNegative, ...] = Field(
        (),
        description="23 rates, of the UNet's embeddings (1), input (9), middle (3) and output blocks (9), and out (1);"
        " 0: frozen",
    )
    args: tuple[str, ...] = Field((), description="key=value ... for the optimizer's constructor")

    # the schedule
    scheduler: str = Field("constant", description=f"schedule of the learning rate: {', '.join(SCHEDULERS)}")
    scheduler_type: str = Field("", description="package.module.Class of a schedule")
    scheduler_args: tuple[str, ...] = Field((), description="key=value ... for the schedule")
    warmup_steps: IntOrShare = Field(0, description="updates in which the rate grows; below 1: a share of all")
    decay_steps: IntOrShare = Field(0, description="updates in which the rate falls; below 1: a share of all")
    num_cycles: PositiveInt = Field(1, description="restarts of cosine_with_restarts")
    power: float = Field(1.0, description="power of polynomial")
    timescale: PositiveInt | None = Field(None, description="time scale of inverse_sqrt; unset: the warm-up")
    min_lr_ratio: Share | None = Field(
        None, description="floor of cosine_with_min_lr and warmup_stable_decay, as a share of the rate"
    )

    # how it updates
    fused_backward: bool = Field(
        False, description="update each parameter during the backward pass and free its gradient"
    )
    fused_groups: PositiveInt | None = Field(
        None, description="update during the backward pass, in about so many groups of parameters"
    )
    schedulefree_wrapper: bool = Field(
        False, description="average the weights as schedule-free optimizers do, around any {optimizer.type}"
    )
    schedulefree_wrapper_args: tuple[str, ...] = Field(
        (), description="key=value ... of that: momentum, weight_decay_at_y, weight_lr_power, r"
    )
