"""What every section of the configuration is, and the kinds of numbers in them."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, le=10**12)]  # no run counts further, and no loop ends there
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
Side = Annotated[int, Field(ge=1, le=1 << 16)]  # of an image, in pixels
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
IntOrShare = Annotated[float, Field(ge=0)]  # below 1 and written as a float: a share of all steps
WHOLE_SHARE = math.nextafter(1.0, 0.0)  # the share that 100% is: 1 is a count
CacheDtype = Literal["fp32", "bf16", "fp16", "fp8"]
EmaWidth = Annotated[float, Field(ge=0.001, le=0.28)]  # a flat average has 0.2887


class Section(BaseModel):
    """Refuse unknown keys; every section is frozen once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
