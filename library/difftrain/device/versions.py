"""Which torch, torch_npu, CANN and driver belong together: the published tables, and a judgement of what is installed.

Sources of the rows
A: release notes of TorchNPU 26.2.0, table of versions and table of compatibility.
B: COMPATIBILITY.md of Ascend/pytorch, table of versions (TorchNPU 26.1.1 and earlier).
C: release notes of Ascend Extension for PyTorch 7.2.0, compatibility of versions.
D: release notes of CANN 9.1.1, CANN and Ascend HDK.
E: release notes of CANN 8.5.0, CANN and Ascend HDK.
F: ascend-deployer, files CANN_8.x.json: the driver that a CANN is deployed with.
G: release notes of MindIE 2.1.RC1, which is CANN 8.2.RC1 and its drivers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class Pair(NamedTuple):
    """One published set. product: the release of TorchNPU that the wheel belongs to; series of CANN hang on it."""

    torch_npu: str
    torch: str
    product: str
    cann: str
    source: str


PAIRS: tuple[Pair, ...] = (
    Pair("2.14.0", "2.14.0", "26.2", "9.2.0", "A"),
    Pair("2.13.0", "2.13.0", "26.2", "9.2.0", "A"),
    Pair("2.12.0.post3", "2.12.0", "26.2", "9.2.0", "A"),
    Pair("2.11.0.post3", "2.11.0", "26.2", "9.2.0", "A"),
    Pair("2.10.0.post7", "2.10.0", "26.2", "9.2.0", "A"),
    Pair("2.9.0.post9", "2.9.0", "26.2", "9.2.0", "A"),
    Pair("2.7.1.post11", "2.7.1", "26.2", "9.2.0", "A"),
    Pair("2.12.0.post2", "2.12.0", "26.1", "9.1", "B"),
    Pair("2.11.0.post2", "2.11.0", "26.1", "9.1", "B"),
    Pair("2.10.0.post6", "2.10.0", "26.1", "9.1", "B"),
    Pair("2.9.0.post8", "2.9.0", "26.1", "9.1", "B"),
    Pair("2.7.1.post10", "2.7.1", "26.1", "9.1", "B"),
    Pair("2.12.0", "2.12.0", "26.1", "9.1.0", "B"),
    Pair("2.11.0", "2.11.0", "26.1", "9.1.0", "B"),
    Pair("2.10.0.post4", "2.10.0", "26.1", "9.1.0", "B"),
    Pair("2.9.0.post6", "2.9.0", "26.1", "9.1.0", "B"),
    Pair("2.7.1.post8", "2.7.1", "26.1", "9.1.0", "B"),
    Pair("2.10.0", "2.10.0", "26.0", "9.0.0", "B"),
    Pair("2.9.0.post2", "2.9.0", "26.0", "9.0.0", "B"),
    Pair("2.8.0.post4", "2.8.0", "26.0", "9.0.0", "B"),
    Pair("2.7.1.post4", "2.7.1", "26.0", "9.0.0", "B"),
    Pair("2.9.0", "2.9.0", "7.3", "8.5.0", "B"),
    Pair("2.8.0.post2", "2.8.0", "7.3", "8.5.0", "B"),
    Pair("2.7.1.post2", "2.7.1", "7.3", "8.5.0", "B"),
    Pair("2.8.0", "2.8.0", "7.2", "8.3.RC1", "B"),
    Pair("2.7.1", "2.7.1", "7.2", "8.3.RC1", "B"),
)  # newest first; the floor is the torch of pyproject.toml

# product of TorchNPU -> (series of CANN that are called compatible, source)
COMPATIBLE: dict[str, tuple[tuple[str, ...], str]] = {
    "26.2": (("8.5", "9.0", "9.1", "9.2"), "A"),
    "26.1": (("8.5", "9.0", "9.1", "9.2"), "A"),
    "26.0": (("8.5", "9.0", "9.1", "9.2"), "A"),
    "7.3": (("8.5", "9.0", "9.1", "9.2"), "A"),
    "7.2": (("8.0", "8.1", "8.2", "8.3"), "C"),
}

# series of CANN -> (series of the driver, which is Ascend HDK, source)
DRIVERS: dict[str, tuple[tuple[str, ...], str]] = {
    "9.1": (("25.2", "25.3", "25.5", "25.7", "26.0", "26.1"), "D"),
    "9.0": (("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1"), "D"),
    "8.5": (("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1"), "D, E"),
    "8.3": (("25.3",), "F"),
    "8.2": (("24.1", "25.0", "25.2"), "F, G"),
    "8.1": (("25.0",), "F"),
}


@dataclass(frozen=True)
class Judgement:
    """Say how something installed stands to the tables. fits: None where the tables say nothing of it."""

    fits: bool | None
    observed: str
    remedy: str = ""


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, for comparing: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def series(version: str) -> str:
    """Return the first two numbers of a version: "8.3.RC1" -> "8.3"."""
    return ".".join(map(str, (*numbers(version), 0, 0)[:2])) if numbers(version) else ""


def same_torch(torch_npu: str, torch: str) -> bool:
    """Tell whether a torch_npu is built for a torch: its first three numbers are that torch's."""
    return (*numbers(torch_npu), 0, 0, 0)[:3] == (*numbers(torch), 0, 0, 0)[:3]


def torch_npu_for(torch: str) -> str:
    """Return the newest published torch_npu of a torch, or the version that by rule would be its."""
    base = ".".join(map(str, (*numbers(torch), 0, 0, 0)[:3]))
    return next((pair.torch_npu for pair in PAIRS if same_torch(pair.torch, torch)), base)


def pair_of(torch_npu: str) -> Pair | None:
    """Return the row of a torch_npu, or of the newest one for the same torch."""
    exact = [pair for pair in PAIRS if pair.torch_npu == torch_npu]
    return next(iter(exact or [pair for pair in PAIRS if same_torch(torch_npu, pair.torch)]), None)


def judge_torch(torch_npu: str, torch: str) -> Judgement:
    """Judge a torch_npu beside a torch. It is compiled against one torch; beside another it cannot be loaded."""
    if same_torch(torch_npu, torch):
        return Judgement(True, f"torch_npu {torch_npu} matches torch {torch}")
    base = ".".join(map(str, (*numbers(torch_npu), 0, 0, 0)[:3]))
    remedy = f"pip install torch_npu=={torch_npu_for(torch)}, or torch=={base}"
    return Judgement(False, f"torch_npu {torch_npu} needs torch {base}, found torch {torch}", remedy)


def judge_cann(torch_npu: str, cann: str | None) -> Judgement:
    """Judge a CANN under a torch_npu."""
    pair = pair_of(torch_npu)
    release = f"CANN {pair.cann}" if pair else "a CANN"
    if cann is None:
        return Judgement(
            None, "the version of CANN could not be read", f"torch_npu {torch_npu} is published for {release}"
        )
    if pair is None:
        return Judgement(None, f"CANN {cann}; no table here has torch_npu {torch_npu}", "see its release notes")
    fitting = COMPATIBLE[pair.product][0]
    if series(cann) == series(pair.cann):
        return Judgement(True, f"CANN {cann} is what torch_npu {torch_npu} is published for")
    if series(cann) in fitting:
        return Judgement(
            True, f"CANN {cann} is listed as compatible with torch_npu {torch_npu}, published for {release}"
        )
    older = numbers(series(cann)) < numbers(fitting[0])
    what = f"CANN {cann} is {'older' if older else 'newer'} than {fitting[0 if older else -1]}, "
    what += f"the {'oldest' if older else 'newest'} called compatible with torch_npu {torch_npu}"
    return Judgement(False if older else None, what, f"install {release}, and source its set_env.sh")


def judge_driver(cann: str | None, driver: str | None) -> Judgement:
    """Judge a driver under a CANN."""
    if driver is None:
        remedy = "in a container, mount the host's driver folder; elsewhere see npu-smi info"
        return Judgement(None, "the version of the driver could not be read", remedy)
    known = DRIVERS.get(series(cann)) if cann else None
    if known is None:
        return Judgement(None, f"driver {driver}; no table here has the drivers of CANN {cann or 'of this machine'}")
    if series(driver) in known[0]:
        return Judgement(True, f"driver {driver} is listed as compatible with CANN {cann}")
    remedy = f"published for CANN {series(str(cann))}: Ascend HDK {', '.join(known[0])}"
    if numbers(series(driver)) < numbers(known[0][0]):
        return Judgement(False, f"driver {driver} is older than those for CANN {cann}", remedy)
    return Judgement(None, f"driver {driver} is not among those published for CANN {cann}", remedy)
