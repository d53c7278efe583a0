"""The sampler of a model in training: how its times are shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Source

# of flux_shift: mu is linear in the number of latent tokens, between these
TOKENS, MU = (256, 4096), (0.5, 1.15)


def scheduler_config(cfg: TrainConfig, source: Source) -> dict[str, Any]:
    """Return the arguments of FlowMatchEulerDiscreteScheduler: sampling shifts its times as training does.

    Where training says nothing of it, as the sampler that came with the weights, or not at all.
    """
    found: dict[str, Any] = {"num_train_timesteps": 1000}
    if cfg.flow.flux_shift:
        tokens = dict(zip(("base_image_seq_len", "max_image_seq_len"), TOKENS, strict=True))
        return found | tokens | {"use_dynamic_shifting": True, "base_shift": MU[0], "max_shift": MU[1]}
    return found | {"shift": cfg.flow.shift or source.shift or 1.0}


def make_scheduler(cfg: TrainConfig, source: Source) -> Any:
    """Make the scheduler that goes into pipelines and exports."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**scheduler_config(cfg, source))
