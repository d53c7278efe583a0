"""Pictures, and what a run does with them until they are cached, for tests in one process and in several."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch

from difftrain.cache import encoding
from difftrain.cache.build import with_cache
from difftrain.cache.store import references
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.index import Metadata
from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Parts, Reject
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.loader import make_loader
from difftrain.data.prepare import Data, make_plan, open_data, prepare
from difftrain.device import choose
from difftrain.distributed.collective import on_each_machine
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.testing.pictures import picture, write_folder

BOTH = {"latents": True, "text": True}
ON_DISK = {"latents_to_disk": True, "text_to_disk": True}
SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (130, 130), (64, 64), (96, 40), (64, 66)]
# entries of their cache: of the table each its own and one for all; and the empty one
PICTURES, CAPTIONS = len(SIZES) + 5, len(SIZES) + 5 + 1 + 1
FLIPPED = 2 * PICTURES


def write_data(root: Path) -> Path:
    """Write a folder of pictures, and beside it a parquet file of pictures with two captions each."""
    write_folder(root / "folder", SIZES)
    rows = [{"image": picture(100 + i, (64, 64)), "caption": [f"number {i}", "a picture"]} for i in range(5)]
    (root / "table").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "table" / "0.parquet")
    return root


def config(root: Path, out: Path, cache: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
    """Return a configuration of these pictures. out: where index and caches go."""
    data = {
        "dirs": (str(root / "folder"), str(root / "table")),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "flip": True,
        "workers": 0,
        "cache_dir": str(out),
    } | sections.pop("data", {})
    training = {"batch_size": 3, "seed": 1, "device": "cpu"} | sections.pop("training", {})
    return TrainConfig.model_validate(
        {"model": {"init_from_config": "tiny"}, "data": data, "training": training, "cache": cache or {}} | sections
    )


@cache
def loaded(precision: str = "no") -> Parts:
    """Load the tiny model, once."""
    cfg = {"model": {"init_from_config": "tiny"}, "training": {"seed": 1, "mixed_precision": precision}}
    return SDXLFamily(TrainConfig.model_validate(cfg)).load()


@dataclasses.dataclass
class Made:
    """A configuration with its data, cached as it asks for."""

    cfg: TrainConfig
    family: SDXLFamily
    parts: Parts
    data: Data
    rejects: list[Reject] = dataclasses.field(default_factory=list)

    def batches(self, epochs: int = 1) -> Iterator[Batch]:
        """Yield what is trained on for some epochs, and what is held out."""
        plan = make_plan(self.data, self.cfg, 3)
        tokenize, features = self.family.tokenizer(self.parts), self.family.features
        last = plan.total_steps(epochs)
        where = {"dp_rank": 0, "dp_size": 1}
        for micro in make_loader(self.data, plan, features, tokenize, self.cfg, first_step=0, last_step=last, **where):
            yield from micro
        if self.cfg.validation.split:
            yield from held_out_set(self.cfg, self.data).batches(tokenize, features)

    def latents(self) -> list[torch.Tensor]:
        """Return the latents of these batches."""
        return [self.family.latents(batch, self.parts) for batch in self.batches()]

    def kept(self, name: str = "moments") -> torch.Tensor:
        """Return what is cached of every picture, as it is and mirrored, in one row."""
        found = self.data.store.pictures
        assert found is not None
        rows = [found.read([i], [way])[name].flatten() for i in range(13) for way in (False, True)]
        return torch.cat(rows)

    def digest(self) -> str:
        """Hash all cached pictures, and some captions."""
        captions = self.data.store.captions
        assert captions is not None
        tokens = self.family.tokenizer(self.parts)(["number 0", "a picture", "picture 1, second, third"])
        hidden = captions.read(tokens)["hidden_2"]
        return hashlib.sha256(self.kept().numpy().tobytes() + hidden.numpy().tobytes()).hexdigest()


def make(cfg: TrainConfig, parts: Parts | None = None, ranks: Ranks | None = None) -> Made:
    """Prepare data and caches as a run does. Every rank calls it."""
    family, ranks = SDXLFamily(cfg), ranks or Ranks()
    parts = parts or loaded(cfg.training.mixed_precision)
    parts = dataclasses.replace(parts, offloaded=set(), notes=[])
    data = open_data(cfg, on_each_machine(ranks, lambda: prepare(cfg, log=lambda line: None)))
    cached = with_cache(cfg, choose("cpu"), ranks, family, parts, data)
    return Made(cfg, family, parts, cached.data, cached.rejects)


def count_encoded(counts: list[int]) -> Any:
    """Note from now on how many samples each call of an encoder gets; return the function that did without."""
    inner = encoding.decoded_batches

    def pieces(*args: Any) -> Iterator[Any]:
        for piece in inner(*args):
            counts.append(len(piece.rows))
            yield piece

    encoding.decoded_batches = pieces  # type: ignore[attr-defined]
    return inner


def entries(cache: Path) -> int:
    """Count what is in a cache, as the last merge left it."""
    return Metadata(cache / "metadata.db").count


def use_of(cache: Path) -> references.Reference:
    """Return the only use of a cache."""
    (use,) = references.all_references(CacheFolder.open(cache))
    return use


def same_inputs(ours: Made, theirs: Made, precision: str = "no", near: float = 1e-5) -> None:
    """Compare what the denoiser gets of two epochs."""
    count = 0
    with choose("cpu").autocast(precision):
        for a, b in zip(ours.batches(2), theirs.batches(2), strict=True):
            found, wanted = ours.family.inputs(a, ours.parts), theirs.family.inputs(b, theirs.parts)
            assert torch.allclose(found.x_t, wanted.x_t, atol=1e-5) and found.timestep.equal(wanted.timestep)
            assert found.target.equal(wanted.target)
            for name, value in wanted.conditions.items():
                assert found.conditions[name].dtype == value.dtype
                assert torch.allclose(found.conditions[name].float(), value.float(), atol=near, rtol=near), name
            count += 1
    assert count > 5


def break_picture(path: Path) -> None:
    """Damage a picture where neither its header nor its end says so."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255  # its header and its end are sound
    path.write_bytes(data)


def build(root: str, out: str) -> None:
    """Build caches as a rank: on disk, once more, in memory, as a machine of its own in memory and on the same disk.

    Prints of each a hash of what is held, and how many samples this rank encoded.
    """
    counts: list[int] = []
    count_encoded(counts)
    launch, said = Launch.from_environment(), []
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=1) as ranks:
        machine = dataclasses.replace(ranks, local_rank=0, local_size=1)
        own, shared = Path(out) / f"of {ranks.rank}", Path(out) / "shared"
        for where, place, folder in (
            (ON_DISK, ranks, Path(out)),
            (ON_DISK, ranks, Path(out)),
            (BOTH, ranks, Path(out)),
            (BOTH, machine, Path(out)),
            (ON_DISK, machine, shared),
            (ON_DISK, machine, own),
        ):
            counts.clear()
            said.append((make(config(Path(root), folder, where), ranks=place).digest(), sum(counts)))
        ranks.barrier()  # what is in memory goes with the rank that reserved it
    print(json.dumps(said))


def fail(root: str, out: str, how: str) -> None:
    """Build a cache as a rank, of which the second one fails in between, or is killed."""
    launch, commit, left = Launch.from_environment(), encoding._write_batch, [5]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0 and launch.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault of rank 1 alone")
        commit(*args)

    encoding._write_batch = failing
    cfg = config(Path(root), Path(out), {"latents_to_disk": True}, data={"dirs": (root,)})
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=1) as ranks:
        make(cfg, ranks=ranks)
