"""Kinds of adapters on one subject: what each learns of it, what each loses of all else, and what each costs.

    python benchmarks/adapter_kinds.py                                     the table, some ten minutes of one core
    python benchmarks/adapter_kinds.py --kinds lora --rates 1e-3 3e-3      a kind at several rates

A small Flux.1 is trained from nothing on coloured shapes (the demo's: VAE, CLIP and vocabularies are fitted to them, nothing is
fetched) and kept below --folder. From there every kind is trained on eight images of a subject, a striped ball, and as many steps
are taken of the same batches with all weights of the blocks. Half of each batch is the subject, the other half images of shapes
from the training set, as DreamBooth's regularisation. Encoders run once, for all kinds.

similarity     of samples for the subject's caption: correlation of pixels with the nearest of 256 other images of it, mean
drift          of samples for captions of shapes from the base's of the same noise: root mean square of pixels, of 255
colour, size   share of those samples that show what the caption says; shapes themselves the base has hardly learnt
seconds        processor time of the steps, on one thread
MiB            weights of the adapter, gradients and AdamW's state, in fp32: what a run has beside the model
bytes          of the export: of an adapter PEFT's file, else that of the denoiser
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import numpy as np
import torch
from PIL import Image, ImageDraw
from workload import built_engine

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Draw, Parts
from difftrain.data.samples import host_draws
from difftrain.demo import datasets, judge
from difftrain.demo.make import MODEL, TRAIN
from difftrain.demo.prepare import make
from difftrain.device import choose
from difftrain.models.registry import make_family
from difftrain.sampling.draw import draw_batch

ROOT = Path(__file__).resolve().parents[1]
FAMILY, SIDE, BUCKET = "flux", 64, Bucket(64, 64)
CAPTION, SHOWN, NEAREST, KEPT = "a beach ball", 8, 256, 256
BLOCKS = r"transformer_blocks\."  # of both lists
RANK = 8
MIB = 1024.0**2


@dataclass(frozen=True)
class Kind:
    """One row: what is trained, at which rate. The rates were chosen by a few tries, no search."""

    title: str
    rate: float
    adapter: dict[str, Any]
    train_only: tuple[str, ...] = ()


KINDS = {
    "full": Kind("all weights of the blocks", 1e-3, {}, (BLOCKS,)),
    "lora": Kind(f"LoRA, rank {RANK}", 3e-3, {"type": "lora", "rank": RANK}),
    "dora": Kind(f"DoRA, rank {RANK}", 3e-3, {"type": "dora", "rank": RANK}),
    "lokr": Kind(f"LoKr, rank {RANK}", 1e-2, {"type": "lokr", "rank": RANK}),
    "oft": Kind("OFT, 8 blocks", 3e-3, {"type": "oft", "rank": 8}),
    "ia3": Kind("(IA)3", 3e-2, {"type": "ia3"}),
}


# --- the subject


def ball(x: float, y: float, radius: float) -> Image.Image:
    """Draw the subject: a pink ball with a wide teal stripe. x, y, radius: shares of the side."""
    big = 4 * SIDE
    image = Image.new("RGB", (big, big), "white")
    cx, cy, r = x * big, y * big, radius * big
    pen = ImageDraw.Draw(image)
    pen.ellipse((cx - r, cy - r, cx + r, cy + r), fill=(245, 120, 190))
    pen.rectangle((cx - 0.94 * r, cy - 0.33 * r, cx + 0.94 * r, cy + 0.33 * r), fill=(0, 110, 110))
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def balls(count: int, seed: int) -> torch.Tensor:
    """Draw the subject at random places and sizes. Shape: (count, 3, side, side) uint8."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        radius = rng.uniform(0.26, 0.34)
        x, y = (radius + 0.02 + (0.96 - 2 * radius) * rng.random() for _ in range(2))
        made.append(pixels_of(ball(x, y, radius)))
    return torch.stack(made)


def pixels_of(image: Image.Image) -> torch.Tensor:
    """Return (3, H, W) uint8."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def similarity(drawn: torch.Tensor, real: torch.Tensor) -> float:
    """Return the mean correlation of pictures with the nearest of the real ones. Shapes: (N, 3, H, W), (M, 3, H, W) in 0..1."""
    a, b = (1 - pictures.flatten(1).double() for pictures in (drawn, real))  # white is nothing
    a, b = (rows - rows.mean(1, keepdim=True) for rows in (a, b))
    a, b = (rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9) for rows in (a, b))
    return float((a @ b.T).amax(1).mean())


# --- a model, and steps of it


class Session:
    """One model with what is trained of it, and features that its encoders have made once."""

    def __init__(self, folder: Path, kind: Kind, rate: float, *, steps: int = 0, decay: float = 0.4) -> None:
        given = {
            "model": {"family": FAMILY, "pretrained": str(folder), "t5_max_length": 16, "train_only": kind.train_only},
            "training": {"seed": 1, "max_grad_norm": 1.0},
            "optimizer": {"learning_rate": rate, "args": ("betas=(0.9, 0.99)",)},
            "adapter": kind.adapter,
        }
        self.family: Any = make_family(TrainConfig.model_validate(given))
        self.parts = self.family.load()
        root = Parts(self.parts.root, config=self.parts.config, base=self.parts.base)
        self.engine = built_engine(self.family, root, choose("cpu"))
        self.steps, self.decay, self.rate = steps, decay, rate

    @torch.no_grad()
    def features(self, pixels: torch.Tensor, captions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Let the encoders make what a cache would hold."""
        rows = torch.arange(len(pixels))
        batch = Batch(BUCKET, rows, rows, {"pixels": pixels, **self.family.tokenizer(self.parts)(list(captions))}, {})
        made: dict[str, torch.Tensor] = {}
        for encoder in self.family.encoders(self.parts).values():
            made |= encoder.encode(batch)
        masks = {name: value for name, value in batch.features.items() if name.startswith("attention_mask")}
        return masks | made

    def train(self, features: dict[str, torch.Tensor], batch: int, first: int = 0) -> tuple[float, float]:
        """Take the steps; return processor seconds and the mean loss of the last fifth.

        first: so many rows of the features are half of every batch, the others the other half.
        """
        count, rng, losses = len(next(iter(features.values()))), torch.Generator().manual_seed(1), []
        began = time.process_time()
        for step in range(self.steps):
            self._set_rate(step)
            if first:
                halves = [torch.randint(*ends, (batch // 2,), generator=rng) for ends in ((0, first), (first, count))]
                rows = torch.cat(halves)
            else:
                rows = torch.randint(count, (batch,), generator=rng)
            uses = [Draw(i, (step * batch + i).to_bytes(16, "little"), 0) for i in range(batch)]
            draws = {name: host_draws(name, spec, BUCKET, uses, 0) for name, spec in self.family.features.draws.items()}
            chosen = {name: value[rows] for name, value in features.items()}
            keys = tuple(use.key for use in uses)
            counts = {"samples": float(batch)}
            made = Batch(BUCKET, rows, torch.zeros_like(rows), chosen, draws, counts=counts, keys=keys, step=step)
            losses.append(float(self.engine.step([made], counts).sums["loss"]))
        last = losses[-max(1, self.steps // 5) :]
        return time.process_time() - began, sum(last) / len(last)

    def _set_rate(self, step: int) -> None:
        """Warm up over a twentieth, and go down to nothing over the last part."""
        up = min(1.0, (step + 1) / max(1, self.steps // 20))
        down = min(1.0, (self.steps - step) / max(1.0, self.steps * self.decay))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.rate * min(up, down)

    def draw(self, captions: Sequence[str], seed: int) -> torch.Tensor:
        """Draw captions, each from noise of its own. Shape: (N, 3, side, side) in 0..1."""
        drawer = self.family.drawer(self.parts)
        shape = (len(captions), *drawer.latent_shape((SIDE, SIDE)))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return draw_batch(drawer, captions, noise, size_hw=(SIDE, SIDE), steps=20, guidance=1.0, sampler="flow_euler",
                          seeds=list(range(len(captions))))  # fmt: skip

    def state_bytes(self) -> int:
        """Count what a run has beside the model: trained weights, gradients, state of the optimizer."""
        trained = [param for param in self.parts.root.parameters() if param.requires_grad]
        state = self.engine.optimizer.state
        moments = sum(t.nbytes for param in trained for t in state[param].values() if t.ndim)
        own = 2 if self.family.cfg.adapter.type else 1  # weights of the model itself are there anyway
        return sum(own * param.nbytes for param in trained) + moments

    def export(self, path: Path) -> Path:
        """Write what was trained."""
        weights = ((name, value.detach()) for name, value in self.parts.root.named_parameters())
        return Path(self.family.export(weights, self.parts, "diffusers_safetensors", path, metadata={}))


def exported_bytes(folder: Path) -> int:
    """Return the size of what one reader needs: PEFT's file of an adapter, else the denoiser."""
    own = folder / "adapter_model.safetensors"
    files = [own] if own.is_file() else list((folder / "transformer").glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


# --- the base


def base_model(folder: Path, steps: int, rate: float) -> Path:
    """Return the model that knows shapes, made and trained where it is not there yet."""
    trained = folder / f"base-{steps}"
    if trained.is_dir():
        return trained
    make("shapes", folder / "demo", 0.5, lambda line: print(line, flush=True), family=FAMILY)
    pixels, captions = zip(*read_tars(folder / "demo" / "pictures" / TRAIN), strict=True)
    session = Session(folder / "demo" / MODEL, Kind("", rate, {}), rate, steps=steps)
    features = session.features(torch.stack(pixels), captions)
    seconds, loss = session.train(features, 32)
    print(f"base: {steps} steps of 32 images in {seconds:.0f} s of the processor, loss {loss:.4f}", flush=True)
    return session.export(trained)


def read_tars(folder: Path) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield pixels and captions."""
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            content = {member.name: stream.read() for member in tar if (stream := tar.extractfile(member))}
        for name, raw in content.items():
            if name.endswith(".png"):
                yield pixels_of(Image.open(io.BytesIO(raw))), content[name.replace(".png", ".txt")].decode()


# --- the table


def main() -> int:
    """Print a row a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "output" / "adapter_kinds", help="keeps model and exports"
    )
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="in place of each kind's own")
    parser.add_argument("--steps", type=int, default=300, help="of each kind, 8 images a step (300)")
    parser.add_argument("--base_steps", type=int, default=300, help="of the base, 32 images a step (300)")
    parser.add_argument("--base_rate", type=float, default=2e-3)
    parser.add_argument("--sheet", type=Path, help="write samples of the subject and of shapes, a row a kind")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    base = base_model(asked.folder, asked.base_steps, asked.base_rate)

    # --- what is compared with: the base's own samples, and other images of the subject
    real, shapes = balls(NEAREST, seed=2) / 255, datasets.captions()
    start = Session(base, Kind("base", 1e-4, {}, (BLOCKS,)), 1e-4)
    before, subject = start.draw(shapes, seed=3), start.draw([CAPTION] * 16, seed=4)
    print("| | rate | similarity | drift | colour right | size right | seconds | MiB | bytes |\n" + "|---" * 9 + "|")
    print(f"| the base | | {similarity(subject, real):.3f} | 0 | {obeyed(before, shapes)} | | | |", flush=True)
    print(f"| images of the subject among themselves | | {similarity(balls(16, seed=5) / 255, real):.3f} | | | | | | |")
    sheet = [torch.cat([subject[:6], before[:12:2]])]

    # --- every kind
    known, captions = zip(*itertools.islice(read_tars(asked.folder / "demo" / "pictures" / TRAIN), KEPT), strict=True)
    images = torch.cat([balls(SHOWN, seed=1), torch.stack(known)])
    features = start.features(images, [CAPTION] * SHOWN + list(captions))
    for name in asked.kinds:
        kind = KINDS[name]
        for rate in asked.rates or [kind.rate]:
            session = Session(base, kind, rate, steps=asked.steps)
            seconds, _ = session.train(features, 8, first=SHOWN)
            subject, after = session.draw([CAPTION] * 16, seed=4), session.draw(shapes, seed=3)
            drift = 255 * float((after - before).square().mean().sqrt())
            size = exported_bytes(session.export(asked.folder / f"kind-{name}"))
            print(f"| {kind.title} | {rate:g} | {similarity(subject, real):.3f} | {drift:.1f} | {obeyed(after, shapes)} | "
                  f"{seconds:.0f} | {session.state_bytes() / MIB:.2f} | {size:,} |", flush=True)  # fmt: skip
            sheet.append(torch.cat([subject[:6], after[:12:2]]))
    if asked.sheet:
        write_sheet(sheet, asked.sheet)
    return 0


def obeyed(drawn: torch.Tensor, captions: Sequence[str]) -> str:
    """Return the cells of colour and size."""
    pictures = [(picture.movedim(0, -1) * 255).round().byte().numpy() for picture in drawn]
    shares = judge.obedience(pictures, captions)
    return f"{shares['colour_right']:.2f} | {shares['size_right']:.2f}"


def write_sheet(rows: Sequence[torch.Tensor], path: Path) -> None:
    """Write a row of samples for each of the table, a PNG."""
    grid = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    Image.fromarray((grid.movedim(0, -1) * 255).round().byte().numpy()).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
