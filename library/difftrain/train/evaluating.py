"""Validation loss during training, on records that are never trained on, with fixed draws."""

from __future__ import annotations

import logging

from difftrain.contracts import Batch
from difftrain.train.state import Run

log = logging.getLogger("difftrain")
