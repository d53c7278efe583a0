"""A command in a job of which some ranks cannot read a file: python unread_by.py RANK,RANK FILE SCRIPT WORD ..."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from difftrain.data.samples import SampleMaker

ranks, name, *words = sys.argv[1:]
made = SampleMaker.sample


def sample(self: Any, record: Any, *more: Any) -> Any:
    if os.environ.get("RANK", "0") in ranks.split(",") and self.index.path(record).endswith(name):
        raise OSError("gone on this machine")
    return made(self, record, *more)


SampleMaker.sample = sample
sys.argv = words
runpy.run_path(words[0], run_name="__main__")
