"""Layers of values -> one configuration: what wins, what a door and a family take by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from difftrain.config.layers import Layer
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import build
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import Fault
from difftrain.models.registry import DEFAULT, FAMILIES
from difftrain.models.row import FamilyRow


@dataclass
class Resolution:
    """What all layers say, and what it comes to."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    other_family: str = ""
    cfg: TrainConfig = field(default_factory=TrainConfig)

    @property
    def batch_of(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs (side, batch) of micro_batch_size_per_gpu, or nothing where one number holds."""
        return tuple(self.values.get("?batch_of") or ())

    @property
    def image_batch_of(self) -> tuple[tuple[int, int], ...]:
        """Return the same of image_micro_batch_size_per_gpu, where images are among clips."""
        return tuple(self.values.get("?image_batch_of") or ())

    def fault(self, path: str, what: str, remedy: str = "") -> None:
        """Note a fault of a field, by the place where it was given."""
        self.faults.append(Fault(self.where(path), what, remedy))
        self.bad.add(path)

    def note(self, path: str, what: str) -> None:
        """Note what is worth saying of a field."""
        self.notes.append(f"{self.where(path)}: {what}")

    def where(self, path: str) -> str:
        """Return the place where a field was given."""
        return self.origins.get(path) or option(path)

    def set(self, path: str, value: Any, like: str) -> None:
        """Give a field a value that comes from another place, wherever else it was given."""
        self.values[path] = value
        self.origins[path] = self.where(like)

    def pop(self, path: str) -> Any:
        """Return what was given under a name, and forget it."""
        return self.values.pop(path, None)


@dataclass(frozen=True)
class Door:
    """What one way of writing a run adds to its layers.

    before: on each layer by itself. merging: as a layer is laid over those below it. together: when all are merged.
    defaults: values of fields that nobody gives, by the family. remedy: what to say of a field whose value does not fit.
    passes_over: what kohya's scripts would pass over is said, no fault, and counts as not given.
    """

    before: Callable[[Sequence[Layer]], None] = lambda layers: None
    merging: Callable[[Resolution, Layer], None] = lambda out, layer: None
    together: Callable[[Resolution, Sequence[Layer]], None] = lambda out, layers: None
    defaults: Callable[[FamilyRow], Mapping[str, Any]] = lambda row: {}
    remedy: Callable[[str], str] = lambda path: ""
    passes_over: bool = False


def resolve_layers(layers: Sequence[Layer], door: Door) -> Resolution:
    """Put layers over one another, the last on top, and build the configuration; faults are collected."""
    out = Resolution()
    door.before(layers)

    # a later layer has the last word on a value; faults and notes are kept of all
    for layer in layers:
        door.merging(out, layer)
        out.values |= layer.values
        out.origins |= {path: layer.origins[path] for path in layer.values}
        out.bad |= layer.bad
        out.faults += layer.faults
        out.notes += layer.notes
        if layer.other_family or "model.family" in layer.values:
            out.other_family = layer.other_family

    # values that follow from others
    door.together(out, layers)
    stages = out.values.get("training.pipeline_stages", 1)
    if out.values.get("deepspeed.enable") and isinstance(stages, int) and stages > 1:
        out.values["deepspeed.enable"] = False
        out.note("deepspeed.enable", f"{option('training.pipeline_stages')}={stages} runs the native pipeline engine")
    if out.values.get("deepspeed.enable") and "training.engine" not in out.values:
        out.set("training.engine", "accelerate", "deepspeed.enable")
        engine = option("training.engine", "accelerate")
        out.note("deepspeed.enable", f"takes {engine}, whose plugin runs DeepSpeed")

    # the sections are checked last, as a whole
    family = FAMILIES.get(str(out.values.get("model.family", DEFAULT)), FAMILIES[DEFAULT])
    sections: dict[str, dict[str, Any]] = {}
    for path, value in {**door.defaults(family), **out.values}.items():
        section, _, name = path.partition(".")
        if not section.startswith("?"):
            sections.setdefault(section, {})[name] = value
    out.cfg, misfits = build(sections)
    for section, name, what, remedy in misfits:
        path = f"{section}.{name}"
        out.fault(path, what, remedy or door.remedy(path))
    out.origins = {path: origin for path, origin in out.origins.items() if not path.startswith("?")}
    return out
