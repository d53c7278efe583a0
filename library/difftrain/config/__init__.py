"""Typed, strict configuration, its flags and its TOML. Imports no torch.

The way of a setting:
 1. spellings/      one table of flags or keys for each entry point: names, kinds, meaning, the field each sets
 2. layers.py       one layer of values for each source: command line, file, environment (accelerate_environment.py)
 3. parse_flags.py, parse_keys.py, parse_text_to_image.py   read the words of an entry point into such layers
 4. resolve.py      which layer wins over the defaults; derive.py what several keys mean together
 5. schema/         sections with every field and its bounds; validate.py there says what does not fit
 6. datasets/       the TOML files of data, kohya's and diffusion-pipe's
 7. rules/          what contradicts or has no effect, reported together with all other faults
 8. door.py         help, faults and notes of a command, and its exit code
digest.py says which fields make a run what it is; reads.py which of them it has read; render/ writes help, docs and
schemas.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import the schema where a section is asked for: what only spells a setting or reads a path does without."""
    if name in __all__:
        from difftrain.config.schema import sections

        return getattr(sections, name)
    raise AttributeError(name)
