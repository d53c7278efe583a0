"""Sides of pictures are multiples of the architecture's own, whichever way the data are named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from difftrain.config import TrainConfig
from difftrain.config.datasets import diffusion_pipe
from difftrain.config.rules.data import sizes
from difftrain.config.schema.families import multiple_of
from difftrain.config.schema.model import ModelSection
from difftrain.config.schema.sections import DataSection, SizeSection
from difftrain.data.plan.buckets import BucketTable
from difftrain.models.registry import FAMILIES

SHIPPED = Path(__file__).resolve().parents[3] / "library" / "difftrain" / "models" / "sizes_shipped"


def of(family: str, **model: object) -> TrainConfig:
    return TrainConfig(model=ModelSection(family=family, **model))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_buckets_of_directories_over_resolutions_and_ratios(family: str) -> None:
    multiple = multiple_of(of(family, pretrained="WEIGHTS"))
    assert multiple == FAMILIES[family].multiple
    for resolution in (256, 500, 512, 768, 1000, 1024, [1000, 700]):
        for low, high, count in ((0.5, 2.0, 9), (0.25, 4.0, 7), (0.4, 2.5, 5), (1.0, 1.0, 1)):
            values = {"resolutions": [resolution], "enable_ar_bucket": True, "min_ar": low, "max_ar": high}
            for found in diffusion_pipe.sizes_of(values | {"num_ar_buckets": count}, multiple):
                assert found.sizes and not [size for size in found.sizes if size[0] % multiple or size[1] % multiple]


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_the_rules_let_pass_makes_whole_multiples(family: str) -> None:
    """Kohya's buckets and plain sizes: what is odd is a fault of the configuration, and nothing else is."""
    cfg, drawn, passed = of(family), random.Random(0), 0
    multiple = multiple_of(cfg)
    for _ in range(150):
        section = SizeSection(
            resolution=(drawn.choice((512, 1000, 1024, 768)), drawn.choice((512, 1000, 1024))),
            enable_bucket=drawn.random() < 0.8,
            min_bucket_reso=drawn.choice((24, 32, 40, 64, 256)),
            max_bucket_reso=drawn.choice((1024, 1536, 2048)),
            bucket_reso_steps=drawn.choice((8, 16, 32, 64, 96, 128)),
            bucket_no_upscale=drawn.random() < 0.3,
        )
        data = DataSection(**section.model_dump())
        refused = bool(list(sizes(cfg.model_copy(update={"data": data}), set())))
        table = BucketTable.of(section)
        made = [side for size in table.sizes for side in size] or [table.steps]
        for ratio in (0.3, 0.75, 1.0, 1.9):
            if table.fits(picture := (int(1500 * ratio), 1500)):
                bucket = table.select(picture).bucket
                made += [bucket.height, bucket.width]
        passed += not refused
        assert refused or not [side for side in made if side % multiple], section
    assert passed > 10


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.json")))
def test_a_file_of_sizes_tells_what_its_name_tells(name: str, tmp_path: Path) -> None:
    family, size, _ = name.split(".")
    row = FAMILIES[family]
    multiple, content = row.sizes_multiple.get(size, row.multiple), json.loads((SHIPPED / name).read_text())
    if "block_out_channels" not in content["vae"]:
        pytest.skip("a VAE whose factor is not told by its levels")
    assert multiple_of(of(family, init_from_config=str(SHIPPED / name))) == multiple
    for part in (row.denoiser, "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(content[part]))
    assert multiple_of(of(family, pretrained=str(tmp_path))) == multiple


def test_one_level_more_doubles_it(tmp_path: Path) -> None:
    content = json.loads((SHIPPED / "sdxl.tiny.json").read_text())
    content["unet"]["block_out_channels"].append(64)
    path = tmp_path / "deeper.json"
    path.write_text(json.dumps(content))
    assert multiple_of(of("sdxl", init_from_config=str(path))) == 2 * FAMILIES["sdxl"].multiple
    path.write_text("{")  # what is wrong with it is said where it is read
    assert multiple_of(of("sdxl", init_from_config=str(path))) == 8
