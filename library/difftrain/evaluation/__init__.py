"""How well a model does on data that it is not trained on.

1. losses.py       mean loss as training draws timesteps, and losses at fixed quantiles
2. features.py     features of images by EfficientNet-Lite0
3. kid.py          their kernel distance: KID of drawn images
"""

from difftrain.evaluation.losses import Validation, quantile_losses, validate

__all__ = ["Validation", "quantile_losses", "validate"]
