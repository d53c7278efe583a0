"""How well a model does on data that it is not trained on: validation loss, and loss at fixed timesteps."""

from difftrain.evaluation.quantile import quantile_losses
from difftrain.evaluation.validation import Validation, validate

__all__ = ["Validation", "quantile_losses", "validate"]
