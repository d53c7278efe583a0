"""Averaged weights of any width, made from the snapshots of a run after it: a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.power_ema import Profile, combine, exponent
from difftrain.train.averages import SNAPSHOTS, UPDATES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """One stored average: its file, which average it is, which run made it, and the names that it holds."""

    path: Path
    profile: Profile
    run: str
    names: frozenset[str]


def snapshots_of(run_dir: Path) -> list[Snapshot]:
    """Read the heads of a run's snapshots, oldest first. Raises ConfigFault where there are none, or of two runs."""
    paths = sorted((run_dir / SNAPSHOTS).glob("*.safetensors"))
    if not paths:
        what = f"{run_dir / SNAPSHOTS} holds no snapshots"
        raise ConfigFault([Fault("--ema_width", what, "they are stored by a run with --ema_profiles at every export")])
    found = sorted((_head(path) for path in paths), key=lambda each: each.profile[::-1])
    for each in found[:-1]:
        if (each.run, each.names) != (found[-1].run, found[-1].names):
            what = f"{each.path} is of another run or model than {found[-1].path.name}"
            raise ConfigFault([Fault("--ema_width", what, "move aside what is not of this run")])
    return found


def _head(path: Path) -> Snapshot:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            profile = Profile(float(about["gamma"]), int(about[UPDATES]))
            return Snapshot(path, profile, about["run"], frozenset(file.keys()))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        what = f"{path} is no snapshot: {type(error).__name__}: {error}"
        raise ConfigFault([Fault("--ema_width", what, "move it aside")]) from None


class Reconstruction:
    """The average of a width at the end of a run, as a sum of stored ones.

    error: how far its profile is from the wanted one, relative. updates: after how many.
    """

    def __init__(self, stored: list[Snapshot], width: float) -> None:
        self.updates = stored[-1].profile.t
        found = combine([each.profile for each in stored], Profile(exponent(width), self.updates))
        self.error = found.error
        self._terms = [(share, each.path) for share, each in zip(found.shares, stored) if share != 0.0]
        self.names = stored[-1].names

    def put_into(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass a stream of weights on, those that were trained averaged. Raises ConfigFault where one never comes."""
        left = set(self.names)
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for _, path in self._terms]
            for name, value in weights:
                if name not in self.names:
                    yield name, value
                    continue
                left.discard(name)
                total = torch.zeros(value.shape, dtype=torch.float64)
                for (share, path), file in zip(self._terms, files):
                    tensor = file.get_tensor(name)
                    if tensor.shape != value.shape:
                        what = f"{name} has the shape {list(tensor.shape)} in {path}, {list(value.shape)} in the model"
                        raise ConfigFault([Fault("--ema_width", what, "give the model of that run")])
                    total += share * tensor.double()
                yield name, total.float()
        if left:
            what = f"the model lacks {len(left)} of the averaged weights, {min(left)} among them"
            raise ConfigFault([Fault("--ema_width", what, "give the model of that run")])
