"""What two runs have to keep to be called alike: by their precision, or as a TOML or JSON file says."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from difftrain.config.schema.section import NonNegative, Section
from difftrain.config.schema.validate import show, unsupported_value, wrong_in
from difftrain.contracts import ConfigFault, Fault

Ratio = Annotated[float, Field(gt=0)]


class Thresholds(Section):
    """Limits of a comparison. Losses and gradient norms that are not given follow the precision; ratios are not asked for."""

    mean_relative_error: NonNegative | None = Field(
        None, description="of the losses of all common steps: mean of |B - A| / |A|"
    )
    step_relative_error: NonNegative | None = Field(
        None, description="of the loss and of the learning rate of every common step"
    )
    grad_norm_relative_error: NonNegative | None = Field(
        None, description="of the gradient norm of every common step, before clipping"
    )
    min_fps_ratio: Ratio | None = Field(None, description="FPS of B over that of A")
    min_compute_fps_ratio: Ratio | None = Field(None, description="compute FPS of B over that of A")
    min_common_steps: Annotated[int, Field(gt=0)] | None = Field(
        None, description="steps that both have: a run that ended early agrees as far as it went"
    )
    max_memory_ratio: Ratio | None = Field(None, description="peak memory of B over that of A")

    def for_precision(self, half: bool) -> Thresholds:
        """Return them with what was not given filled in. half: either run computes in bf16 or fp16."""
        explicit = self.model_dump(exclude_none=True)
        return (HALF if half else FULL).model_copy(update=explicit)


# Twenty steps, the same work on two devices: the loss of a step as re-split over ranks and engines it is held to 1e-6,
# and to 1e-5 of a committed figure. Means are narrower than single steps, because rounding has no direction.
FULL = Thresholds(mean_relative_error=1e-6, step_relative_error=1e-5, grad_norm_relative_error=1e-4)
HALF = Thresholds(mean_relative_error=1e-2, step_relative_error=2e-2, grad_norm_relative_error=5e-2)


def read_thresholds(path: Path) -> Thresholds:
    """Read limits from a file: JSON where it is named .json, else TOML.

    Raises: ConfigFault with every fault of the file.
    """
    table = _table(path)
    odd = {key: reason for key, value in table.items() if (reason := unsupported_value(value))}
    faults = [Fault(f"{path} {key}", reason) for key, reason in odd.items()]
    plain = {key: value for key, value in table.items() if key not in odd}
    try:
        read = Thresholds.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            where = " ".join(map(str, detail["loc"]))
            faults.append(Fault(f"{path} {where}", *wrong_in(Thresholds, detail)))
    if faults:
        raise ConfigFault(faults)
    return read


def _table(path: Path) -> dict[str, Any]:
    is_json = path.suffix.lower() == ".json"
    try:
        text = path.read_bytes().decode("utf-8")
        table = json.loads(text) if is_json else tomllib.loads(text)
    except OSError as error:
        remedy = "give a TOML or JSON file of thresholds"
        raise ConfigFault([Fault(str(path), f"cannot be read: {error.strerror}", remedy)]) from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, or are nested without end, too
        raise ConfigFault([Fault(str(path), f"is not {'JSON' if is_json else 'TOML'}: {error}")]) from error
    if not isinstance(table, dict):
        raise ConfigFault([Fault(str(path), f"must be a table of thresholds, got {show(table)}")])
    return table
