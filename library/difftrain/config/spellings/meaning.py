"""What a setting means, said once at its field (config/schema/) and spelt as a door spells it."""

from __future__ import annotations

from difftrain.config.schema.validate import description_of
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import Door, spelled


def meaning(row: Row, door: Door) -> str:
    """Return what a row means: what it says itself, else what its field does."""
    return spelled(row.help or description_of(row.to), door=door)


def field_meaning(path: str, door: Door) -> str:
    """Return what "section.field" means."""
    return spelled(description_of(path), door=door)
