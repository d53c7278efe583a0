"""The whole configuration: typed, strict, one class a section; the sections stand beside this file, by subject.

A field's meaning stands at the field and nowhere else; help, docs, messages and JSON schemas take it from there. Another
setting is named in it by its field, {training.max_steps} or {cache.latents=true}, which is rendered in the spelling of
who asks (config/spellings/spelling.py). Field names are the ones users see in TOML. No torch here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from difftrain.config.schema.adapter import AdapterSection
from difftrain.config.schema.data import (
    CacheSection,
    CaptionSection,
    ClipSection,
    DataSection,
    DatasetSection,
    EvalSection,
    EvalSetSection,
    PictureSection,
    SizeSection,
    SubsetSection,
    ValidationSection,
)
from difftrain.config.schema.model import ModelSection
from difftrain.config.schema.objective import (
    EmaSection,
    FlowSection,
    LossSection,
    NoiseSection,
    PatchMaskingSection,
    RepaSection,
    TreadSection,
)
from difftrain.config.schema.outputs import (
    DemoSection,
    HubSection,
    LoggingSection,
    MetadataSection,
    SampleSection,
    SaveSection,
)
from difftrain.config.schema.section import Section
from difftrain.config.schema.training import (
    DeepSpeedSection,
    FsdpSection,
    MemorySection,
    OptimizerSection,
    TrainingSection,
)

__all__ = [
    "AdapterSection",
    "CacheSection",
    "CaptionSection",
    "ClipSection",
    "DataSection",
    "DatasetSection",
    "DeepSpeedSection",
    "DemoSection",
    "EmaSection",
    "EvalSection",
    "EvalSetSection",
    "FlowSection",
    "FsdpSection",
    "HubSection",
    "LoggingSection",
    "LossSection",
    "MemorySection",
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


class TrainConfig(Section):
    """The whole resolved configuration of a training run."""

    model: ModelSection = ModelSection()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    captions: CaptionSection = CaptionSection()
    cache: CacheSection = CacheSection()
    training: TrainingSection = TrainingSection()
    memory: MemorySection = MemorySection()
    fsdp: FsdpSection = FsdpSection()
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
        """Return the samples that a rank takes in one micro batch, of each dataset; then of images alone, where these have their own.

        Buckets of the tables say which of these is theirs: BucketRows.group.
        """
        pairs = [(dataset.batch_size, dataset.image_batch_size) for dataset in self.data.datasets]
        pairs = pairs or [(self.training.batch_size, self.training.image_batch_size)]
        sizes = tuple(size for size, _ in pairs)
        apart = self.training.image_batch_size is not None
        return (*sizes, *(size if own is None else own for size, own in pairs)) if apart else sizes

    @property
    def batches_by(self) -> str:
        """Say what several batch sizes are of."""
        if self.training.image_batch_size is not None:
            return ", of clips and of images"
        return ", by dataset" if len(self.batch_sizes) > 1 else ""

    @property
    def holds_base(self) -> bool:
        """Tell whether most weights are only held: an adapter is trained, or what train_only names."""
        return self.adapter.type is not None or bool(self.model.train_only)

    def replicas(self, world: int) -> int:
        """Return the data-parallel replicas among so many processes: stages of a pipeline and ranks that share tokens take one each."""
        return max(1, world // (self.training.pipeline_stages * self.training.sequence_parallel))

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
