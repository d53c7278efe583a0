"""Sections about what a run writes: exports and checkpoints, hubs, images, numbers, an export's header; the demo."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from difftrain.config.schema.section import PositiveInt, Section


class SaveSection(Section):
    """What is written, when, and how much of it is kept."""

    output_dir: str | None = Field(None, description="folder for everything that the run writes")
    output_name: str = Field("last", description="name of exports and states")
    model_as: Literal["ckpt", "safetensors", "diffusers", "diffusers_safetensors"] | None = Field(
        None, description="layout of exports; unset: safetensors, or the family's own"
    )
    precision: Literal["float", "fp16", "bf16"] | None = Field(
        None, description="precision of exported weights; unset: what they are kept in, fp32 where trained"
    )

    # when
    every_n_steps: PositiveInt | None = Field(None, description="export every n steps")
    every_n_epochs: PositiveInt | None = Field(None, description="export every n epochs")
    every_n_examples: PositiveInt | None = Field(None, description="export every n samples")
    checkpoint_every_n_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="minutes between checkpoints"
    )
    checkpoint_every_n_epochs: PositiveInt | None = Field(None, description="a checkpoint every n epochs")
    checkpoint_every_n_steps: PositiveInt | None = Field(None, description="a checkpoint every n steps")
    naming: Literal["kohya", "steps", "diffusers"] = Field(
        "kohya",
        description="steps: epochN/ stepN/ and global_stepN/; diffusers: checkpoint-N/, and the last export, of averaged"
        " weights where there are some, at the top of the folder",
    )
    run_dirs: bool = Field(False, description="every run in a folder of {save.output_dir}, named by its start in UTC")
    n_epoch_ratio: PositiveInt | None = Field(None, description="export at least this often over all epochs")

    # what is kept
    last_n_steps: PositiveInt | None = Field(
        None, description="keep the exports of the last n steps, and never fewer than two"
    )
    last_n_epochs: PositiveInt | None = Field(
        None, description="keep the exports of the last n epochs, and never fewer than two"
    )
    last_n_steps_state: PositiveInt | None = Field(
        None, description="the same for states; wins over {save.last_n_steps}"
    )
    last_n_epochs_state: PositiveInt | None = Field(
        None, description="the same for states; wins over {save.last_n_epochs}"
    )
    last_n_states: PositiveInt | None = Field(
        None, description="keep this many of the newest checkpoints, and never fewer than two"
    )
    state: bool = Field(False, description="with every export, save what an exact resume needs")
    state_on_train_end: bool = Field(False, description="save the state at the end")
    asynchronous: bool = Field(
        False, description="training goes on while a checkpoint is written from copies; what ends the run waits for it"
    )

    # going on
    resume: str | None = Field(
        None,
        description="FOLDER of a state, or of a run's checkpoint; auto: the newest complete one in {save.output_dir}, else"
        " a fresh start; with {save.run_dirs=true} also latest, or a step",
    )
    reset_dataloader: bool = Field(False, description="a resume starts its epoch from the first batch")
    reset_optimizer: bool = Field(False, description="a resume begins with a new optimizer and schedule")
    reset_optimizer_params: bool = Field(
        False, description="a resume takes rate, decay and betas from the configuration"
    )
    preempt_file: str | None = Field(
        None,
        description="when this file appears, the run saves a checkpoint at the next step and ends with exit code 75;"
        " one that is there before it starts counts once it is written anew",
    )
    no_metadata: bool = Field(False, description="write no metadata into exports")


class HubSection(Section):
    """Where exports and states are sent to, and whether a resume takes a state from there."""

    repo_id: str | None = Field(None, description="upload every export to this hub repository: organisation/name")
    repo_type: Literal["model", "dataset"] = Field("model", description="kind of repository")
    path_in_repo: str | None = Field(None, description="folder in the repository; unset: its root")
    visibility: Literal["private", "public"] | None = Field(
        None, description="who sees it; unset: a new one is private, another stays as it is"
    )
    save_state: bool = Field(False, description="send states too")
    resume: bool = Field(False, description="{save.resume} names a state on a hub: REPO_ID/PATH[:REVISION[:TYPE]]")
    async_upload: bool = Field(False, description="send in the background; training continues meanwhile")


class SampleSection(Section):
    """Images drawn during training."""

    prompts: str | None = Field(
        None,
        description="prompts to sample: .txt, one per line with kohya's options (--w --h --d --s --l --n --ss --fs --f), .toml"
        " or .json",
    )
    texts: tuple[str, ...] = Field((), description="prompts as text, each sampled in 20 steps")
    every_n_steps: PositiveInt | None = Field(None, description="sample images every n steps")
    every_n_epochs: PositiveInt | None = Field(None, description="sample images every n epochs")
    from_first_epoch: bool = Field(
        False, description="count {sample.every_n_epochs} from the first epoch on: after epochs 1, 1 + n, 1 + 2n"
    )
    at_first: bool = Field(False, description="sample images before the first step")
    test_only: bool = Field(
        False,
        description="sample {sample.prompts} once, from the model as it stands or as it is resumed, and stop",
    )
    sampler: str = Field(
        "ddim",
        description="sampler of prompts that name none; flow models have their own: flow_euler, flow_heun",
    )


class LoggingSection(Section):
    """Where numbers go."""

    log_every: PositiveInt = Field(1, description="steps between lines of metrics")
    timed_step: PositiveInt | None = Field(
        None, description="a step whose time the report names by itself, with the images per second and device"
    )
    loss_target: Annotated[float, Field(gt=0)] | None = Field(
        None, description="what the loss of the last step is to be below: the report gives a verdict"
    )
    x_axis_examples: bool = Field(False, description="trackers count samples in place of steps")
    logging_dir: str | None = Field(None, description="folder of TensorBoard events; unset: logs in {save.output_dir}")
    log_with: Literal["tensorboard", "wandb", "swanlab", "mlflow", "all"] | None = Field(
        None, description="trackers in addition to metrics.jsonl; all: tensorboard and wandb"
    )
    log_prefix: str | None = Field(None, description="start of the name of a run's log folder")
    tracker_name: str | None = Field(None, description="project name in the tracker")
    wandb_run_name: str | None = Field(None, description="name of the run in W&B, SwanLab or MLflow")
    tracker_config: str | None = Field(None, description="TOML file with arguments of the trackers")
    log_config: bool = Field(
        False, description="send the configuration to the trackers; TensorBoard, whose files stay here, always has it"
    )
    console_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = Field(
        None, description="least important message shown on the console"
    )
    console_file: str | None = Field(None, description="write console messages to this file too")
    console_simple: bool = Field(False, description="console messages without time and level")
    trace: str | None = Field(
        None,
        description="steps in which every module's inputs, outputs and gradients are written to trace in"
        " {save.output_dir}, such as 1,3-5: difftrain compare --trace RUN RUN names the first module that parts",
    )


def step_ranges(text: str) -> tuple[range, ...]:
    """Return the steps that {logging.trace} names, counted from 1. Raises ValueError."""
    ranges = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last.isdecimal() or not dash):
            raise ValueError(f"{part.strip()!r} is neither a step nor a range of steps")
        steps = range(int(first), int(last or first) + 1)
        if steps.start < 1 or not steps:
            raise ValueError(f"{part.strip()!r} holds no step: they are counted from 1, the smaller number first")
        ranges.append(steps)
    return tuple(ranges)


class MetadataSection(Section):
    """What is written into the header of an export."""

    title: str | None = Field(None, description="modelspec.title of exports")
    author: str | None = Field(None, description="modelspec.author of exports")
    description: str | None = Field(None, description="modelspec.description of exports")
    license: str | None = Field(None, description="modelspec.license of exports")
    tags: str | None = Field(None, description="modelspec.tags of exports, separated by commas")
    usage_hint: str | None = Field(None, description="modelspec.usage_hint of exports")
    thumbnail: str | None = Field(None, description="modelspec.thumbnail of exports: an image file or data URL")
    merged_from: str | None = Field(None, description="modelspec.merged_from of exports")
    trigger_phrase: str | None = Field(None, description="modelspec.trigger_phrase of exports")
    preprocessor: str | None = Field(None, description="modelspec.preprocessor of exports")
    is_negative_embedding: str | None = Field(None, description="modelspec.is_negative_embedding of exports")
    training_comment: str | None = Field(None, description="ss_training_comment of exports")


class DemoSection(Section):
    """The embedded demo: what it trains on, and its scores."""

    dataset: Literal["shapes", "emoji"] | None = Field(None, description="the embedded demo: which images it makes")
    score: bool = Field(False, description="score the demo's model at the end")
    make: Literal["tiny", "shapes", "emoji", "pairs", "clips"] | None = Field(
        None, description="model and data that are made before training, where the folder lacks what the run names"
    )
    folder: str | None = Field(None, description="where they are made")
