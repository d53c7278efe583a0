"""Messages that speak of sdxl_pretrain.py's flags, in the words of train.py."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from copy import copy

from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.keys import KEYS, OPTIONS, key_of
from difftrain.contracts.errors import ConfigFault, DifftrainError, Fault

_FLAG = re.compile(r"--([a-z][a-z0-9_]*)(?![\w-]|\.\w)")
_FIRST = {
    "data.dataset_config": "--dataset",
    "save.resume": "--resume_from_checkpoint",
    "training.batch_size": "--training.micro_batch_size_per_gpu",
    "training.gradient_checkpointing": "--optimization.activation_checkpointing",
    "training.engine": "--engine.type",
    "model.family": "--model.type",
}


def spelt(path: str) -> str:
    """Return how train.py's command line spells a field."""
    key = key_of(path)
    return _FIRST.get(path) or (key.option if key is not None else f"--{path}")


def in_own_words(text: str) -> str:
    """Put the keys of train.py in the place of flags."""

    def other(found: re.Match[str]) -> str:
        flag = FLAGS.get(found[1])
        if found[1] in OPTIONS:  # train.py has it under the same name
            return found[0]
        if flag is None:
            return next((key.option for key in KEYS if key.name == found[1] and key.home), found[0])
        if not flag.to:
            return found[0]
        value = ""
        if flag.kind == "switch":
            value = f"={str(flag.sets).lower() if isinstance(flag.sets, bool) else flag.sets}"
        return spelt(flag.to) + value

    said = _FLAG.sub(other, text)
    for key in KEYS:
        for word, mine in key.words.items() if key.home else ():
            if isinstance(word, bool):  # a key that is true or false, of a field that has words
                said = said.replace(f"{key.option}={mine}", f"{key.option}={str(word).lower()}")
    return said


def faults_in_own_words(faults: Iterable[Fault]) -> list[Fault]:
    """Do so for faults, each once."""
    said = (Fault(*(in_own_words(text) for text in (each.where, each.what, each.remedy))) for each in faults)
    return list(dict.fromkeys(said))


def log_in_own_words() -> None:
    """Let what this package logs in this process speak so too."""

    def reword(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_own_words(record.getMessage()), ()
        return True

    logging.getLogger("difftrain").addFilter(reword)


def error_in_own_words(error: DifftrainError) -> DifftrainError:
    """Do so for an error of any room."""
    if isinstance(error, ConfigFault):
        return ConfigFault(faults_in_own_words(error.faults))
    found = copy(error)  # one may carry more than its words
    found.args = (in_own_words(str(error)), *error.args[1:])
    return found
