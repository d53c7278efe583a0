"""Averaged weights of a run: kept beside training, in checkpoints, as snapshots; and made from these afterwards, of any width."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from difftrain.checkpoint.tensor_files import CheckpointReader, FlatRange, Shape, write_safetensors
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Extent, Fault
from difftrain.diffusion.ema import Average, Ema, PowerEma, Profile, combine, exponent
from difftrain.engine.snapshot import HostBuffers
from difftrain.models.weights.writers import safetensors_writer
from difftrain.train.streams import all_tried, to_the_end

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.config.schema.sections import EmaSection, ModelSection
    from difftrain.contracts import Engine
    from difftrain.distributed.ranks import Ranks


log = logging.getLogger("difftrain")
PLAIN, POWER = "ema", "ema_{width}"  # files ema-00000.safetensors, ema_0.05-00000.safetensors
UPDATES = "updates"
SNAPSHOTS = "ema_snapshots"
SNAPSHOT_DTYPES = {"float": torch.float32, "fp16": torch.float16}
GIB = float(1 << 30)
SMALL, HALF = 0.05, 0.5  # shares of an average that are what it began with: of no account, and too much to draw from


class Averages:
    """The averages of a run's weights: a moving one, and those by relative width; begun from the weights as they are."""

    def __init__(self, section: EmaSection, engine: Engine) -> None:
        self.section, self.engine = section, engine
        weights = [(name, shard) for name, shard, _ in engine.shards()]
        self.ema = Ema(weights, section.decay, ramp=section.ramp) if section.enable else None
        self.profiles = [PowerEma(weights, width) for width in section.profiles]
        self.snapshots_at: int | None = None  # the step that the last snapshots are of

    def update(self, step: int) -> None:
        """Take in the weights after an update. step: updates done before it."""
        due = (step + 1) % self.section.update_every == 0  # by the step's number: a resume keeps the rhythm
        averages: list[Ema | PowerEma] = [*([self.ema] if self.ema is not None and due else []), *self.profiles]
        for average in averages:
            average.update((name, shard) for name, shard, _ in self.engine.shards())

    # --- weights to look at

    def averaged(self) -> AbstractContextManager[None]:
        """Put averaged weights in place, the run's or the optimizer's own: validation looks at those."""
        return self.engine.swapped(self.ema.weights) if self.ema is not None else self.engine.averaged_weights()

    def drawable(self) -> tuple[AbstractContextManager[None], str]:
        """Put in place what pictures are drawn from, and say what that is.

        Averaged weights, but those as trained while most of the average is what it began with: of random weights nothing
        but noise is drawn.
        """
        if self.ema is None:
            return self.engine.averaged_weights(), "trained weights"
        if self.ema.start_share > HALF:
            description = f"raw weights, as the average is still {percent(self.ema.start_share)} of its start"
            return self.engine.averaged_weights(), description
        return self.engine.swapped(self.ema.weights), "averaged weights"

    def looks(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """Yield the weights that are compared, by the prefix of their numbers: as trained, and averaged where they are.

        A schedule-free optimizer's weights are its own averages in either case: those are what it has learnt.
        """
        yield "", self.engine.averaged_weights()
        if self.ema is not None:
            yield "ema_", self.engine.swapped(self.ema.weights)

    # --- what is said of them

    def announce(self, model: ModelSection, begins_at: int, step: int, total_steps: int) -> Iterator[str]:
        """Say how much of the run's average is its own start, and what power-function averages cost; once all is restored.

        begins_at: the first step of a fresh run.
        """
        if self.ema is not None and not self.ema.ramp:  # of a ramp nothing of the start is left
            yield from self._of_the_start(self.ema, model, begins_at, step, total_steps)
        if not self.profiles:
            return
        count = sum(tensor.numel() for tensor in self.profiles[0].weights.values())
        precision = self.section.snapshot_precision
        size = count * SNAPSHOT_DTYPES[precision].itemsize
        widths = ", ".join(f"{ema.width} (gamma {ema.gamma:.3f})" for ema in self.profiles)
        yield (
            f"averages of relative width {widths}: {4 * count / GIB:.4g} GiB each in memory; every export stores a snapshot of "
            f"each in {SNAPSHOTS}/, {size / GIB:.4g} GiB in {precision}, which are never deleted"
        )

    def _of_the_start(self, ema: Ema, model: ModelSection, begins_at: int, done: int, end: int) -> Iterator[str]:
        """Say how much of an average is what it began with, where that is random or stays above a twentieth."""
        every = self.section.update_every
        left = end // every - done // every
        share = ema.decay ** (ema.updates + left)
        since_start = ema.updates == done // every - begins_at // every
        random = since_start and not (model.pretrained or model.transformer)
        if not left and not ema.updates:
            yield (
                f"EMA: it is updated every {every} steps, and the run has {end}: it keeps the initial weights "
                "([ema] update_every)"
            )
        elif random or share > SMALL:
            what, half = "random initial weights" if random else "initial weights", self._step_of(HALF, ema, done)
            drawn = f"; samples use the raw weights until step {half}"
            yield (
                f"EMA: {percent(share)} {what} left at the last step ({end}), under {percent(SMALL)} from step "
                f"{self._step_of(SMALL, ema, done)} on ([ema] decay {ema.decay:g}, "
                f"update_every {every})" + (drawn if half > done else "")
            )

    def _step_of(self, share: float, ema: Ema, done: int) -> int:
        """Return the step from which on no more than this share of an average is of its start; this one, where that is so."""
        every = self.section.update_every
        needed = math.ceil(math.log(share) / math.log(ema.decay))
        return done if needed <= ema.updates else (done // every + needed - ema.updates) * every

    # --- checkpoints

    def snapshot(self, buffers: HostBuffers | None = None) -> Callable[[Path], list[Path]]:
        """Return what writes this rank's share of all averages into a checkpoint: those of whole weights are the first rank's.

        buffers: what holds copies of them as they are now; None: it writes them as they are when it is called.
        """
        moving: list[tuple[str, Ema | PowerEma]] = [(PLAIN, self.ema)] if self.ema is not None else []
        files = []
        for kind, average in (*moving, *self._by_width()):
            file = self.engine.average_file(kind, average.state_dict(), {UPDATES: str(average.updates)})
            if file is None:
                continue
            tensors = dict(file.tensors)
            if buffers is not None:
                tensors = buffers.copy(tensors.items(), kind)
            files.append((file.name, tensors, dict(file.metadata)))

        def write(folder: Path) -> list[Path]:
            for name, tensors, metadata in files:
                write_safetensors(folder / name, tensors, metadata)
            return [folder / name for name, _, _ in files]

        return write

    def _by_width(self) -> list[tuple[str, PowerEma]]:
        return [(POWER.format(width=ema.width), ema) for ema in self.profiles]

    def load(self, folder: Path, ranks: Ranks, step: int) -> None:
        """Take all averages from the checkpoint of a step. Every rank calls it, once the weights are restored.

        A moving average that the checkpoint has not begins with its weights.
        """
        # the moving average
        reader = CheckpointReader(folder, PLAIN, ranks)
        if self.ema is None:
            if reader.shapes:
                log.warning(
                    f"%s has averaged weights, which are not continued: {option('ema.enable', True)} is not given",
                    folder,
                )
        elif reader.shapes:
            self._load(self.ema, reader)
            known = reader.metadata[0].get(UPDATES)  # written before checkpoints said it, it began with the run
            self.ema.updates = int(known) if known else step // self.section.update_every
        else:
            self.ema = Ema([(name, shard) for name, shard, _ in self.engine.shards()], self.section.decay)
            log.info("%s has no averaged weights: the average starts from those of step %d", folder, step)

        # those by width
        left = sorted({path.name.rpartition("-")[0] for path in folder.glob("ema_*-*.safetensors")})
        left = [kind for kind in left if kind not in {POWER.format(width=ema.width) for ema in self.profiles}]
        if left:
            log.warning(
                f"%s has averages that are not continued, as {option('ema.profiles')} does not list them: %s",
                folder,
                left,
            )
        for kind, ema in self._by_width():
            reader = CheckpointReader(folder, kind, ranks)
            self._load(ema, reader)
            ema.updates = int(reader.metadata[0][UPDATES])

    def _load(self, average: Average, reader: CheckpointReader) -> None:
        """Take of every average what this rank holds of its weight. Raises KeyError or ValueError where they differ."""
        shards = {name: (extent, tuple(shard.shape)) for name, shard, extent in self.engine.shards()}
        trained = self.engine.trained_shapes()

        def wanted(name: str, shape: Shape) -> FlatRange | None:
            if name in trained and name not in shards:
                return None  # another rank's
            extent, own = shards.get(name, (Extent(shape, 0), shape))
            if extent.shape != shape:
                raise ValueError(f"average of {name}: shape {shape}, not {extent.shape}")
            return FlatRange(extent.offset, own)

        average.load_state_dict({name: tensor.clone() for name, tensor in reader.ranges(wanted)})

    # --- snapshots

    def store_snapshots(self, out: Path, step: int, ranks: Ranks, identity: dict[str, Any]) -> None:
        """Write a snapshot of every average by width, once a step. Every rank calls it: gathering is collective.

        identity: of the run that makes them.
        """
        if self.snapshots_at == step:  # the export at the end of a run may follow one of its last step
            return
        dtype = SNAPSHOT_DTYPES[self.section.snapshot_precision]
        shapes = {name: (dtype, shape) for name, shape in self.engine.trained_shapes().items()}
        run = f"{identity['config_digest']} {identity['seed']}" if self.profiles else ""

        def store(ema: PowerEma) -> None:
            with to_the_end(self.engine.full_weights(ema.weights)) as weights:
                if not ranks.is_logger:
                    return
                path = snapshot_path(out, ema.width, ema.updates)
                path.parent.mkdir(exist_ok=True)
                about = {"gamma": repr(ema.gamma), "width": repr(ema.width), UPDATES: str(ema.updates), "run": run}
                with safetensors_writer(path, shapes, about) as writer:
                    for name, tensor in weights:
                        if name in shapes:
                            writer.write(name, tensor.to(shapes[name][0]))
                log.info("snapshot %s/%s", SNAPSHOTS, path.name)

        all_tried(partial(store, ema) for ema in self.profiles)
        self.snapshots_at = step


def percent(share: float) -> str:
    """Write a share in words."""
    return f"{100 * share:.3g} %"


def require_profiles(cfg: TrainConfig, folder: Path | None, ranks: Ranks) -> None:
    """Refuse averages by width that a checkpoint has not, before the data: they are of a run from its first step on.

    Every rank calls it. Raises ConfigFault.
    """
    if folder is None:
        return
    here = ranks.gather({path.name.rpartition("-")[0] for path in folder.glob("ema_*-*.safetensors")})
    left = [str(width) for width in cfg.ema.profiles if POWER.format(width=width) not in set().union(*here)]
    if left:
        what = f"{folder} has no average of relative width {', '.join(left)}"
        raise ConfigFault([Fault(option("ema.profiles"), what, "resume with the widths of that run")])


# ---------------------------------------------------------------------- averages of any width, made from snapshots


def snapshot_path(out: Path, width: float, updates: int) -> Path:
    """Return where a snapshot lies."""
    return out / SNAPSHOTS / f"{width}-{updates:08d}.safetensors"


@dataclass(frozen=True)
class AverageSnapshot:
    """One stored average: its file, which average it is, which run made it, and the names that it holds."""

    path: Path
    profile: Profile
    run: str
    names: frozenset[str]


def snapshots_of(run_dir: Path) -> list[AverageSnapshot]:
    """Read the heads of a run's snapshots, oldest first. Raises ConfigFault where there are none, or of two runs."""
    paths = sorted((run_dir / SNAPSHOTS).glob("*.safetensors"))
    if not paths:
        what = f"{run_dir / SNAPSHOTS} holds no snapshots"
        raise ConfigFault(
            [Fault("--ema_width", what, f"a run stores them with {option('ema.profiles')} at every export")]
        )
    snapshots = sorted((_head(path) for path in paths), key=lambda snapshot: snapshot.profile[::-1])
    for snapshot in snapshots[:-1]:
        if (snapshot.run, snapshot.names) != (snapshots[-1].run, snapshots[-1].names):
            what = f"{snapshot.path} belongs to another run or model than {snapshots[-1].path.name}"
            raise ConfigFault([Fault("--ema_width", what, "move files of other runs away")])
    return snapshots


def _head(path: Path) -> AverageSnapshot:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            profile = Profile(float(about["gamma"]), int(about[UPDATES]))
            return AverageSnapshot(path, profile, about["run"], frozenset(file.keys()))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        what = f"{path} is not a snapshot: {type(error).__name__}: {error}"
        raise ConfigFault([Fault("--ema_width", what, "move it away")]) from None


class Reconstruction:
    """The average of a width at the end of a run, as a sum of stored ones.

    error: how far its profile is from the wanted one, relative. updates: after how many.
    """

    def __init__(self, stored: list[AverageSnapshot], width: float) -> None:
        self.updates = stored[-1].profile.t
        combination = combine([snapshot.profile for snapshot in stored], Profile(exponent(width), self.updates))
        self.error = combination.error
        self._terms = [(share, snapshot.path) for share, snapshot in zip(combination.shares, stored) if share != 0.0]
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
