"""Types that the rooms agree on. A leaf: imports nothing of this package, and torch only for type checkers."""

from difftrain.contracts.engine import Engine, Extent, Snapshot, Stats
from difftrain.contracts.errors import ConfigFault, DataFault, DifftrainError, Fault, TrainingFault
from difftrain.contracts.family import (
    EVERY,
    METRIC,
    Drawer,
    DrawSpec,
    Encoder,
    Family,
    Feature,
    FeatureSpec,
    Group,
    Inputs,
    NoiseMix,
    Parts,
    RunFacts,
    Tokenize,
)
from difftrain.contracts.records import Batch, Bucket, Draw, MediaRef, Record, Reject

__all__ = [
    "EVERY",
    "METRIC",
    "Batch",
    "Bucket",
    "ConfigFault",
    "DataFault",
    "DifftrainError",
    "Draw",
    "DrawSpec",
    "Drawer",
    "Encoder",
    "Engine",
    "Extent",
    "Family",
    "Fault",
    "Feature",
    "FeatureSpec",
    "Group",
    "Inputs",
    "MediaRef",
    "NoiseMix",
    "Parts",
    "Record",
    "Reject",
    "RunFacts",
    "Snapshot",
    "Stats",
    "Tokenize",
    "TrainingFault",
]
