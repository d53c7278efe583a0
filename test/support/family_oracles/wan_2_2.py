"""Wan 2.2: as Wan 2.1; of its pipeline one expert is loaded, and draws at all times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from family_oracles import wan


def alone(pipe: Any) -> Any:
    pipe.transformer_2 = pipe.transformer
    return pipe


assert wan.ORACLE.drawn is not None
ORACLE = replace(wan.ORACLE, converter="", released={}, drawn=replace(wan.ORACLE.drawn, mended=alone))
