"""Typed, strict configuration, its flags and its TOML. Imports no torch."""

from difftrain.config.schema.sections import (
    CaptionSection,
    DataSection,
    DemoSection,
    EmaSection,
    LoggingSection,
    LossSection,
    MetadataSection,
    ModelSection,
    OptimizerSection,
    SampleSection,
    SaveSection,
    TrainConfig,
    TrainingSection,
    ValidationSection,
)

__all__ = [
    "CaptionSection",
    "DataSection",
    "DemoSection",
    "EmaSection",
    "LoggingSection",
    "LossSection",
    "MetadataSection",
    "ModelSection",
    "OptimizerSection",
    "SampleSection",
    "SaveSection",
    "TrainConfig",
    "TrainingSection",
    "ValidationSection",
]
