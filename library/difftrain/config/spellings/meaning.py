"""What a setting means, said once at its field (config/schema/) and spelt as a door spells it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from difftrain.config.schema.validate import description_of
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import Door, option

Spell = Callable[[str, Any], str]  # takes a field and a value of it, or None; returns how that is spelt
NAMED = re.compile(r"\{([a-z]\w*\.\w+)(?:=(\w+))?\}")  # {training.max_steps}, {cache.latents=true}
_SWITCHED = {"true": True, "false": False}


def render(text: str, spell: Spell) -> str:
    """Put its spelling in the place of every setting that a text names."""
    return NAMED.sub(lambda found: spell(found[1], _SWITCHED.get(found[2], found[2])), text)


def meaning(row: Row, door: Door) -> str:
    """Return what a row means: what it says itself, else what its field does."""
    return render(row.help or description_of(row.to), partial(option, door=door))


def field_meaning(path: str, door: Door) -> str:
    """Return what "section.field" means."""
    return render(description_of(path), partial(option, door=door))
