"""How the entry point that is running spells a setting: a flag of kohya's or diffusers' script, or train.py's key.

Messages name fields, never flags: `option("training.batch_size")` in a sentence that is made when it is needed,
"{training.batch_size}" in a literal table of sentences, which spelled() fills in. The door says once who speaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

# the tables and the schema are imported where a setting is named: processes that look at files name none, and start
# in half the time
if TYPE_CHECKING:
    from difftrain.config.spellings.row import Row

Door = Literal["kohya", "train", "text_to_image"]

# {training.max_steps}, {cache.latents=true}
FIELD = re.compile(r"\{([a-z]\w*\.[a-z]\w*)(?:=([^{}]+))?\}")
# where train.py has an option of the command line or a first choice among several keys
_TRAIN_FIRST = {
    "data.dataset_config": "--dataset",
    "save.resume": "--resume_from_checkpoint",
    "training.batch_size": "--training.micro_batch_size_per_gpu",
    "training.gradient_checkpointing": "--optimization.activation_checkpointing",
    "training.engine": "--engine.type",
    "model.family": "--model.type",
    "cache.only": "--cache_only",
    "logging.trace": "--trace",
    "cache.trust": "--trust_cache",
    "cache.regenerate": "--regenerate_cache",
    "hub.token": "huggingface_token",
}
# where a flag of diffusers' script becomes the setting together with others
_TEXT_TO_IMAGE_FIRST = {
    "data.dirs": "--dataset_name",
    "hub.token": "--hub_token",
    "hub.repo_id": "--hub_model_id",
    "logging.log_with": "--report_to",
    # and where a switch is one value of several
    "data.random_crop": "[data] random_crop",
    "optimizer.type": "[optimizer] type",
    "training.attention": "[training] attention",
}
_KOHYA_FIRST = {"hub.token": "--huggingface_token"}  # moved to the environment: no field holds it
_door: Door = "kohya"  # one for a process, and for those that are forked from it


@contextmanager
def speaking(door: Door) -> Iterator[None]:
    """Let option() spell as a door does, until the block ends."""
    global _door
    before, _door = _door, door
    try:
        yield
    finally:
        _door = before


def is_kohyas() -> bool:
    """Tell whether the entry point that is running takes kohya's flags, and passes over what his scripts pass over."""
    return _door == "kohya"


def option(path: str, value: Any = None, *, door: Door | None = None) -> str:
    """Return how the command line spells "section.field", or that it has a value.

    value: as the field has it, true or a word; None: the field alone.
    """
    spoken = door or _door
    if spoken == "train":
        return _key(path, value)
    if spoken == "text_to_image":
        from difftrain.config.spellings.text_to_image import FLAGS as TEXT_TO_IMAGE

        return _flag(path, value, TEXT_TO_IMAGE, _TEXT_TO_IMAGE_FIRST)
    from difftrain.config.spellings.flags import FLAGS

    return _flag(path, value, FLAGS, _KOHYA_FIRST)


def spelled(text: str, *, door: Door | None = None) -> str:
    """Fill in {section.field} and {section.field=value}, as option() spells them."""
    return fill_in(text, partial(option, door=door))


def fill_in(text: str, spell: Callable[[str, Any], str]) -> str:
    """Do so in a spelling of one's own. spell: takes a field, and a value of it or None."""
    values: dict[str, Any] = {"true": True, "false": False}
    return FIELD.sub(lambda named: spell(named[1], values.get(named[2], named[2])), text)


def meaning(row: Row, door: Door | None = None) -> str:
    """Return what a row means: what it says itself, else what its field does (config/schema/).

    door: unset, the one that speaks.
    """
    return spelled(row.help, door=door) if row.help or row.to.startswith("?") else field_meaning(row.to, door)


def field_meaning(path: str, door: Door | None) -> str:
    """Return what "section.field" means."""
    from difftrain.config.schema.validate import description_of

    return spelled(description_of(path), door=door)


def _flag(path: str, value: Any, table: Mapping[str, Row], first: Mapping[str, str]) -> str:
    """Return the flag: the switch that sets the value, else the first that sets the field; else the key of --config."""
    flags = [flag for flag in table.values() if flag.to == path]
    if value is not None:
        switch = next((flag for flag in flags if flag.kind == "switch" and flag.sets == value), None)
        if switch is not None:
            return switch.option
        flags = [flag for flag in flags if flag.kind != "switch"] or flags
        worded = flags[0].words if flags else {}
        value = next((word for word, mine in worded.items() if mine == value), value)
    name = first.get(path) or (flags[0].option if flags else "[{}] {}".format(*path.split(".", 1)))
    return name if value is None else f"{name}={_text(value)}"


def _key(path: str, value: Any) -> str:
    """Return train.py's option, section.key, with the value in the key's words."""
    from difftrain.config.spellings.keys import key_of

    key = key_of(path)
    name = _TRAIN_FIRST.get(path) or (key.option if key is not None else f"--{path}")
    if value is None or name in ("--cache_only", "--trust_cache", "--regenerate_cache"):
        return name
    if key is not None and key.option == name:
        # a key that is true or false, of a field that has words
        value = next((word for word, mine in key.words.items() if mine == value and isinstance(word, bool)), value)
    return f"{name}={_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
