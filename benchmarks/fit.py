"""Will it fit? python benchmarks/fit.py [--write] [RECIPE ...]: the memory of the recipes that are named by a device's size.

Estimates, not measured on hardware: what `--dry_run` says of one device, without data and weights. --write puts the table into
docs/memory.md, a shorter one into the READMEs, and each recipe's line into its file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "library"))
PAGE, CONFIGS = ROOT / "docs" / "memory.md", ROOT / "configs"
BEGINS, ENDS = "<!-- table: python benchmarks/fit.py --write -->", "<!-- end of the table -->"
HEAD = (
    "| recipe | device | images per step | weights, GiB | optimizer and EMA, GiB | one step, GiB | total, GiB | with driver and libraries |\n"
    "|---|---|---|---|---|---|---|---|"
)
# READMEs, and the head of the table between their markers: recipe, images per step, GiB with driver and libraries
SHORT = {"README.md": "| recipe | images per step | GiB |", "README.zh.md": "| 配方 | 每步图片数 | GiB |"}
SHORT_BEGINS, SHORT_ENDS = "<!-- fit -->", "<!-- /fit -->"
SIZES = {"sdxl": "base", "sd3_light": "light"}  # folder of recipes -> the size that stands for their weights


def recipes() -> list[str]:
    """List the recipes, by folder and by the memory of their device."""
    found = [path.relative_to(CONFIGS).as_posix() for path in CONFIGS.glob("*/*gb.toml")]
    return sorted(found, key=lambda name: (name.partition("/")[0] != "sdxl", device_gib(name)))


def device_gib(name: str) -> int:
    """Return the memory of the device that a recipe is named by."""
    return int(re.findall(r"(\d+)gb\.toml", name)[0])


def configuration(name: str):
    """Read a recipe with random weights of the same size in place of its own, and an empty folder of pictures."""
    from difftrain.config.parse_keys import parse

    text = (CONFIGS / name).read_text(encoding="utf-8")
    text = re.sub(r"^(checkpoint_path|diffusers_path) .*$", "", text, flags=re.MULTILINE)
    size = SIZES[name.partition("/")[0]]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        recipe, data = Path(folder) / "recipe.toml", CONFIGS / Path(name).parent / "pictures.toml"
        recipe.write_text(text.replace("[model]", f'[model]\ninit_from_config = "{size}"'))
        (Path(folder) / "data" / "pictures").mkdir(parents=True)
        (Path(folder) / "pictures.toml").write_text(data.read_text())
        os.chdir(folder)
        try:
            return parse([f"--config={recipe}"]).config
        finally:
            os.chdir(before)


def estimate(name: str):
    """Estimate the memory of a recipe's device at the largest bucket of its data."""
    from difftrain.contracts import Bucket
    from difftrain.models.registry import make_family
    from difftrain.train.estimate.footprint import cached_parts, device_memory

    cfg = configuration(name)
    family = make_family(cfg)
    parts = family.load(meta=True)
    parts.offloaded |= cached_parts(cfg, parts)
    width, height = max((size for each in cfg.data.datasets for size in each.sizes), key=lambda size: size[0] * size[1])
    return device_memory(cfg, family, parts, 1, Bucket(height, width), cfg.training.batch_size)


def row(name: str, memory) -> str:
    """Write a line of the table."""
    from difftrain.train.estimate.footprint import GIB, RESERVE

    weights = sum(item.size for item in memory.items if "weights" in item.what and "averaged" not in item.what)
    weights += sum(item.size for item in memory.items if item.what.startswith("beside"))
    numbers = (weights, memory.standing - weights, memory.step, memory.total, memory.total + RESERVE)
    figures = " | ".join(f"{number / GIB:.1f}" for number in numbers)
    return f"| `configs/{name}` | {device_gib(name)} GB | {memory.batch} | {figures} |"


def short(row_of_page: str) -> str:
    """Return a line of the READMEs' table for one of the page's."""
    recipe, _, images, *_, needed = (cell.strip() for cell in row_of_page.split("|")[1:-1])
    return f"| {recipe} | {images} | {needed} |"


def line(memory) -> str:
    """Write what stands in the recipe."""
    from difftrain.train.estimate.footprint import GIB, RESERVE

    return f"# memory: {(memory.total + RESERVE) / GIB:.1f} GiB, estimated, not measured on hardware (docs/memory.md)"


def main() -> int:
    """Print the table, or write it."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--write", action="store_true")
    words.add_argument("recipes", nargs="*", default=[])
    given = words.parse_args()
    rows = []
    for name in given.recipes or recipes():
        memory = estimate(name)
        rows.append(row(name, memory))
        print(rows[-1], "fits" if memory.verdict(device_gib(name) * 2**30) == "fits" else "DOES NOT FIT", flush=True)
        if given.write:
            path = CONFIGS / name
            path.write_text(re.sub(r"^# memory: .*$", line(memory), path.read_text(), count=1, flags=re.MULTILINE))
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGINS)
        known = {each.split("`")[1]: each for each in rest.partition(ENDS)[0].splitlines() if each.startswith("| `")}
        known |= {each.split("`")[1]: each for each in rows}
        rows = [known[f"configs/{name}"] for name in recipes() if f"configs/{name}" in known]
        for readme, short_head in SHORT.items():
            page = (ROOT / readme).read_text(encoding="utf-8")
            before, _, after = page.partition(SHORT_BEGINS)
            table = "\n".join([short_head, "|---|---|---|", *map(short, rows)])
            text = f"{before}{SHORT_BEGINS}\n\n{table}\n\n{SHORT_ENDS}{after.partition(SHORT_ENDS)[2]}"
            (ROOT / readme).write_text(text, encoding="utf-8")
        PAGE.write_text(f"{head}{BEGINS}\n\n" + "\n".join([HEAD, *rows]) + f"\n\n{ENDS}{rest.partition(ENDS)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
