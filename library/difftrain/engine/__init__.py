"""Engines: how steps are run. A new one is a file and a line here.

The way of a step:
 1. native.py, accelerate.py   wrap the root module; accelerate_sharded.py, accelerate_zero.py: state in pieces
    fsdp.py, sharded_weights.py   cut weights, gradients and state over the ranks
 2. base.py         micro batches under autocast: forward, weighted sums, backward
 3. ddp.py          gradients are summed over ranks, never averaged; gradients.py looks at the first ones
 4. update.py       unscale, measure, clip, skip or update; fused.py updates during the backward pass instead
 5. half_precision.py, master_weights.py   the fp32 value of half weights, and who holds it
 6. pipeline.py, stages.py   instead of 1 to 3: the model cut into stages, each on its own rank
 7. checkpointing.py, snapshot.py   what a rank writes, and how everything is taken back, on any number of ranks
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Engine, Fault

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks

ENGINES = {
    "native": "difftrain.engine.native:NativeEngine",
    "fsdp": "difftrain.engine.fsdp:FsdpEngine",
    "accelerate": "difftrain.engine.accelerate:AccelerateEngine",
}
# what --engine=accelerate becomes with --deepspeed, and with fairscale's OSS on several ranks
ZERO = "difftrain.engine.accelerate_zero:ZeroEngine"
PIPELINE = "difftrain.engine.pipeline:PipelineEngine"  # what native becomes with several stages
SHARDED = "difftrain.engine.accelerate_sharded:ShardedEngine"


def make_engine(cfg: TrainConfig, device: Device, ranks: Ranks) -> Engine:
    """Make the engine that a configuration names. Raises ConfigFault for an unknown one."""
    target = ENGINES.get(cfg.training.engine)
    if target is None:
        known = ", ".join(sorted(ENGINES))
        raise ConfigFault(
            [Fault(option("training.engine"), f"there is no engine {cfg.training.engine!r}", f"one of: {known}")]
        )
    if cfg.training.engine == "accelerate" and cfg.deepspeed.enable:
        target = ZERO
    elif cfg.training.engine == "accelerate" and cfg.optimizer.type.lower() == "oss" and ranks.size > 1:
        target = SHARDED
    elif cfg.training.engine == "native" and cfg.training.pipeline_stages > 1:
        target = PIPELINE

    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)(cfg, device, ranks)
