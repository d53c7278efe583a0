"""How well a model does on data that it is not trained on: mean loss, loss at fixed timesteps, and KID of drawn pictures."""

from difftrain.evaluation.losses import Validation, quantile_losses, validate

__all__ = ["Validation", "quantile_losses", "validate"]
