"""A family of a few layers: everything an engine must bear (dropout, statistics, two loss terms), in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from difftrain.contracts import Batch, Bucket, Carry, DrawSpec, Encoder, FeatureSpec, Group, Inputs, Parts

CHANNELS, SIDE = 3, 4
_STEPS = 1000


class TinyBlock(nn.Sequential):
    """A block whose code is not torch's own, which a compiler leaves alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers one after another."""
        for layer in self:
            x = layer(x)
        return x


class TinyRoot(nn.Module):
    """Blocks over a flattened picture, with the timestep as one more input."""

    def __init__(self, width: int = 16, blocks: int = 3, dropout: float = 0.0, statistics: bool = False) -> None:
        super().__init__()
        size = CHANNELS * SIDE * SIDE
        self.first = nn.Linear(size + 1, width)
        self.blocks = nn.ModuleList(
            TinyBlock(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * width, width),
            )
            for _ in range(blocks)
        )
        self.statistics = nn.BatchNorm1d(width) if statistics else None
        self.last = nn.Linear(width, size)

    def forward(self, x_t: Tensor, timestep: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Predict. Shapes: x_t (B, C, H, W), timestep (B,) -> (B, C, H, W)."""
        time = timestep[:, None].to(x_t.dtype) / _STEPS
        hidden = self.first(torch.cat([x_t.flatten(1), time], 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.statistics is not None:
            hidden = self.statistics(hidden)
        return self.last(hidden).unflatten(1, x_t.shape[1:])


class TinyChain:
    """The blocks of a TinyRoot (see contracts.Chain). Layout: the shape of a picture."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.units = [f"blocks.{i}" for i in range(len(root.blocks))]

    def owner(self, name: str) -> int:
        """Return the block of a weight; running statistics are used behind all of them."""
        kind, _, inner = name.partition(".")
        return {"first": -1, "blocks": int(inner.partition(".")[0]) if kind == "blocks" else 0}.get(
            kind, len(self.units)
        )

    def kind(self, batch: Batch) -> Any:
        """Say nothing beside the shapes."""
        return None

    def enter(self, inputs: Inputs) -> tuple[Carry, tuple[int, ...]]:
        """Run the first layer."""
        time = inputs.timestep[:, None].to(inputs.x_t.dtype) / _STEPS
        hidden = self._root.first(torch.cat([inputs.x_t.flatten(1), time], 1))
        return {"hidden": hidden}, tuple(inputs.x_t.shape[1:])

    def names(self, layout: tuple[int, ...], number: int) -> list[str]:
        """Name what goes from block to block."""
        return ["hidden"]

    def unit(self, number: int, carry: Carry, layout: tuple[int, ...]) -> Carry:
        """Run a block."""
        return {"hidden": carry["hidden"] + self._root.blocks[number](carry["hidden"])}

    def leave(self, carry: Carry, layout: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Run the last layer."""
        hidden = carry["hidden"]
        if self._root.statistics is not None:
            hidden = self._root.statistics(hidden)
        return (self._root.last(hidden).unflatten(1, layout),)


class TinyFamily:
    """Learn to undo noise on small pictures; options are TinyRoot's, and terms: how many loss terms there are."""

    name = "tiny"

    def __init__(self, lr: float = 1e-3, terms: int = 1, seed: int = 0, **options: Any) -> None:
        self.lr, self.terms, self.seed, self.options = lr, terms, seed, options

    @property
    def features(self) -> FeatureSpec:
        """Ask for noise and a timestep."""
        return FeatureSpec({}, {"noise": DrawSpec("normal", CHANNELS), "timestep": DrawSpec("integer", high=_STEPS)})

    def load(self, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
        """Build the model from the seed; what is frozen has no weights that could be left away."""
        with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(self.seed)
            root = TinyRoot(**self.options)
        return Parts(root, {"encoder": nn.Identity()})

    def missing_tokenizers(self) -> dict[str, str]:
        """Lack nothing."""
        return {}

    def tokenizer(self, parts: Parts) -> Callable[[list[str]], dict[str, Tensor]]:
        """Return what makes nothing of captions."""
        return _no_tokens

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Return none."""
        return {}

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks."""
        return [(f"blocks.{i}", block) for i, block in enumerate(parts.root.blocks)]  # type: ignore[arg-type]

    def chain(self, root: nn.Module) -> TinyChain:
        """Return the blocks as a row that can be cut."""
        return TinyChain(root)

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the same blocks, for compiling."""
        return [block for _, block in self.units(parts)]

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Return the pictures as they are."""
        return batch.features["pixels"].float()

    def inputs(self, batch: Batch, parts: Parts) -> Inputs:
        """Mix picture and noise by the timestep."""
        x, noise, t = self.latents(batch, parts), batch.draws["noise"], batch.draws["timestep"]
        share = (t / _STEPS)[:, None, None, None]
        return Inputs((1 - share) * x + share * noise, t, {}, x, torch.ones(len(t), device=x.device))

    def forward(self, root: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
        """Predict the picture."""
        return (root(inputs.x_t, inputs.timestep, inputs.conditions),)

    def loss_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum the samples' mean squared errors, and absolute ones where there are two terms."""
        error = outputs[0] - inputs.target
        sums = {"square": (inputs.weight * error.square().flatten(1).mean(1)).sum()}
        if self.terms > 1:
            sums["absolute"] = 0.1 * (inputs.weight * error.abs().flatten(1).mean(1)).sum()
        return sums

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Make two groups with rates of their own."""
        named = [(name, parameter) for name, parameter in root.named_parameters() if parameter.requires_grad]
        body = [pair for pair in named if pair[0].startswith("blocks.")]
        remaining = [pair for pair in named if not pair[0].startswith("blocks.")]
        return [Group("body", body, self.lr), Group("rest", remaining, self.lr / 2, weight_decay=0.1)]

    def export(self, weights: Iterable[tuple[str, Tensor]], parts: Parts, layout: str, path: Path, **_: Any) -> Path:
        """Write the weights as they are."""
        from safetensors.torch import save_file

        path = path.with_name(path.name + ".safetensors")
        save_file(dict(weights), path)
        return path

    def drawer(self, parts: Parts, predict: Callable[[Inputs], Tensor] | None = None) -> Any:
        """There is nothing to draw."""
        raise NotImplementedError("a tiny family draws no pictures")

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count two operations a weight forward and four backward."""
        return 6.0 * sum(parameter.numel() for parameter in parts.root.parameters() if parameter.ndim > 1)


def _no_tokens(captions: list[str]) -> dict[str, Tensor]:
    return {}


def tiny_batch(samples: Iterable[int], seed: int = 0) -> Batch:
    """Make a batch of samples by number: each is the same whatever batch it is in."""
    samples = list(samples)
    shape = (CHANNELS, SIDE, SIDE)
    rows = [np.random.Generator(np.random.Philox(key=[seed, sample])) for sample in samples]
    pixels, noise = ([row.standard_normal(shape, dtype=np.float32) for row in rows] for _ in range(2))
    return Batch(
        bucket=Bucket(SIDE, SIDE),
        record_id=torch.tensor(samples, dtype=torch.int64),
        occurrence=torch.zeros(len(samples), dtype=torch.int64),
        features={"pixels": torch.from_numpy(np.stack(pixels))},
        draws={
            "noise": torch.from_numpy(np.stack(noise)),
            "timestep": torch.tensor([int(row.integers(_STEPS)) for row in rows]),
        },
        counts={"samples": float(len(samples))},
    )


def tiny_step(step: int, global_batch: int, dp_rank: int = 0, dp_size: int = 1, accumulation: int = 1) -> list[Batch]:
    """Return a rank's micro batches of a step, as the loader deals them: draws [rank::size], cut into pieces."""
    mine = list(range(step * global_batch, (step + 1) * global_batch))[dp_rank::dp_size]
    size = len(mine) // accumulation
    return [tiny_batch(mine[i * size : (i + 1) * size]) for i in range(accumulation)]


def tiny_uneven_step(step: int, sizes: Sequence[int], dp_rank: int = 0, dp_size: int = 1) -> list[Batch]:
    """Return a rank's micro batches of a step of micro batches of so many samples: number rank, rank + dp_size, ...

    As a plan of every use deals them: where the last round has none for a rank, it goes along with another's, idle.
    """
    first = [1000 * step + sum(sizes[:number]) for number in range(len(sizes))]
    micro = []
    for round_ in range(0, len(sizes), dp_size):
        own = round_ + dp_rank
        if own < len(sizes):
            micro.append(tiny_batch(range(first[own], first[own] + sizes[own])))
        else:
            micro.append(replace(tiny_batch([first[round_]]), idle=True, counts={"samples": 0.0}))
    return micro
