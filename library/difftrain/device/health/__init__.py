"""Checks of `difftrain doctor` that must know kinds of devices: installation, variables, devices, what they compute."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from difftrain.device.torch_device import Device
    from difftrain.device.versions import Judgement


# --- What a check of the doctor is given, and what it finds


Verdict = Literal["ok", "note", "wrong"]


class HealthFinding(NamedTuple):
    """One finding. remedy: what to do; empty only where nothing is to be done. about: which of several things."""

    verdict: Verdict
    observed: str
    remedy: str = ""
    about: str = ""


@dataclass
class Context:
    """Say what the doctor was asked to look at. kind: of device, or "auto". Folders: as given, or None."""

    kind: str = "auto"
    data_dir: str | None = None
    cache_dir: str | None = None
    output_dir: str | None = None

    @functools.cached_property
    def device(self) -> Device:
        """Take the device that training would take. Raises ConfigFault."""
        from difftrain.device.choice import choose

        return choose(self.kind)


def of_judgement(judged: Judgement, about: str = "") -> HealthFinding:
    """Turn a judgement of versions into a finding: what no table knows is a note."""
    verdict: Verdict = "ok" if judged.fits else "wrong" if judged.fits is False else "note"
    return HealthFinding(verdict, judged.observed, judged.remedy, about)
