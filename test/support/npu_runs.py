"""The door's work in this very process, on the simulated device or the CPU, watched step by step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.models.registry import FAMILIES


@dataclass
class Trained:
    """One run: what it was, its losses, its weights at the start, and what the device did in each step but the first."""

    out: Path
    run: Any
    start: dict[str, torch.Tensor]
    losses: list[float]
    steps: list[Counter[str]] = field(default_factory=list)  # [0] is from the first update to the second

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained weights where they are."""
        return {
            name: each.detach() for name, each in self.run.model.parts.root.named_parameters() if each.requires_grad
        }

    def report(self) -> dict[str, Any]:
        """Read report.json."""
        return json.loads((self.out / "report.json").read_text())


Runner = Callable[..., Trained]


def runner(data: Path, base: Path, patch: pytest.MonkeyPatch) -> Runner:
    """Return a function that trains the tiny SDXL: train("npu", "--mixed_precision=bf16", steps=4)."""
    from difftrain.config.parse_flags import parse

    watched = _watcher(base, patch)

    def runs(device: str, *flags: str, steps: int, out: str | None = None, code: int = 0) -> Trained:
        folder = base / (out or f"{device}{len(list(base.iterdir()))}")
        line = {
            "--init_from_config": "tiny", "--train_data_dir": str(data), "--output_dir": str(folder),
            "--output_name": "NAME", "--resolution": "64,64", "--enable_bucket": "", "--min_bucket_reso": "32",
            "--max_bucket_reso": "128", "--train_batch_size": "2", "--max_train_steps": str(steps),
            "--learning_rate": "1e-4", "--seed": "1", "--log_every": "100", "--max_data_loader_n_workers": "0",
            "--device": device,
        }  # fmt: skip
        line |= {flag.partition("=")[0]: flag.partition("=")[2] for flag in flags}
        argv = [f"{name}={value}" if value else name for name, value in line.items()]
        return watched(parse(argv).config, argv, code)

    return runs


LIGHT = ('train_type = "sd3_light_pretrain"', "num_layers = 3")  # what SD3-Light's recipes say beside the family


def toml_runner(data: Path, base: Path, patch: pytest.MonkeyPatch, family: str = "sd3") -> Runner:
    """Return a function that trains a family's tiny size: train("npu", "--loss.text_recon_gamma=0.1", steps=4)."""
    from difftrain.config.parse_keys import parse

    watched = _watcher(base, patch)
    recipe, pictures = base / "recipe.toml", base / "pictures.toml"
    pictures.write_text(f"resolutions = [64]\n[[directory]]\npath = '{data}'\n")
    recipe.write_text(
        f"""{LIGHT[0] if family == "sd3" else ""}
        [output]
        dataset = '{pictures}'
        [model]
        type = "{family}"
        init_from_config = "tiny"
        {LIGHT[1] if family == "sd3" else ""}
        {"t5_max_length = 32" if "model.t5_max_length" in FAMILIES[family].takes else ""}
        [training]
        micro_batch_size_per_gpu = 2
        seed = 1
        epochs = 100
        [optimizer]
        type = "adamw"
        lr = 1e-4
        [save]
        save_every_n_epochs = 100
        [data]
        num_dataloader_workers = 0
        [monitoring]
        logging_steps = 100
        """
    )

    def runs(device: str, *flags: str, steps: int, out: str | None = None, code: int = 0) -> Trained:
        folder = base / (out or f"{device}{len(list(base.iterdir()))}")
        argv = [f"--config={recipe}", f"--output.output_dir={folder}", f"--training.device={device}"]
        argv += [f"--training.max_steps={steps}", *flags]
        return watched(parse(argv).config, argv, code)

    return runs


def _watcher(base: Path, patch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """Return a function that runs a configuration in this process and notes what the device did."""
    from third_patch import apply_for

    from difftrain.train import finalize
    from difftrain.train import run as running
    from difftrain.train.averages import Averages
    from difftrain.train.meter import Meter

    patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    patch.setattr(finalize, "measure_matmul", lambda *_, **__: 1e12)  # seconds of no interest here
    update, train, judge = Averages.update, running.train, Meter._judge

    def watched(cfg: Any, argv: list[str], code: int) -> Trained:
        import simulator

        seen: list[Counter[str]] = []
        kept: dict[str, Any] = {}
        losses: list[float] = []

        def mine(averages: Averages, step: int) -> None:
            update(averages, step)
            seen.append(simulator.counts())

        def capture(run: Any, *rest: Any) -> bool:
            kept["run"] = run
            kept["start"] = {
                name: each.detach().cpu().clone() for name, each in run.model.parts.root.named_parameters()
            }
            return train(run, *rest)

        def judged(meter: Meter, step: int, loss: float, *rest: Any) -> None:
            losses.append(loss)
            judge(meter, step, loss, *rest)

        patch.setattr(Meter, "_judge", judged)
        patch.setattr(Averages, "update", mine)
        patch.setattr(running, "train", capture)
        apply_for(cfg.training.engine)
        assert running.run(cfg, argv) == code
        each = []
        for before, after in itertools.pairwise(seen):
            after = Counter(after)
            after.subtract(before)
            each.append(+after)
        return Trained(kept["run"].out, kept["run"], kept["start"], losses, each)

    return watched
