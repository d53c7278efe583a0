"""What each recipe of configs/presets takes of its device, planned without one: python benchmarks/presets.py [--write] [NAME ...].

NAME: 24gb/flux, or a part of it. The model is the release that the recipe names, at 1024 px (models/releases). --write puts
the table into docs/memory.md. Ends with 1 where a recipe does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "benchmarks")]
PRESETS = ROOT / "configs" / "presets"
RECIPES = (path for path in PRESETS.glob("*gb/*.toml") if path.stem != "pictures")
NAMES = sorted(path.relative_to(PRESETS).with_suffix("").as_posix() for path in RECIPES)
RELEASES = {"flux": "dev", "flux2": "dev", "hidream": "i1", "qwen_image": "1.0", "sd3": "large35"}
SIDE = 1024
PAGE = ROOT / "docs" / "memory.md"
HEAD, END = "<!-- presets: python benchmarks/presets.py --write -->", "<!-- end of the presets -->"


def configuration(name: str, folder: Path) -> Any:
    """Read a recipe as train.py does, with the sizes of its release in the place of weights."""
    from releases import sizes_of

    from difftrain.config.parse_keys import parse

    family = name.partition("/")[2]
    releases = ROOT / "library" / "difftrain" / "models" / "releases" / f"{family}.json"
    release = json.loads(releases.read_text(encoding="utf-8"))["releases"][RELEASES[family]]
    file = folder / f"{family}.json"
    file.write_text(json.dumps(sizes_of(family, release)), encoding="utf-8")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    (folder / "data.toml").write_text(f'resolutions = [{SIDE}]\n[[directory]]\npath = "{pictures}"\n', encoding="utf-8")
    text = (PRESETS / f"{name}.toml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("diffusers_path", "llama3_path", "dataset"))]
    at = lines.index("[model]") + 1
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join([*lines[:at], f'init_from_config = "{file}"', *lines[at:]]), encoding="utf-8")
    words = [f"--config={recipe}", f"--dataset={folder / 'data.toml'}", f"--output.output_dir={folder / 'out'}"]
    return parse([*words, f"--data.cache_dir={folder / 'cache'}"]).config


def plan(name: str) -> Any:
    """Plan a recipe; return what it takes, and its configuration."""
    from difftrain.contracts import Bucket
    from difftrain.train.estimate.fitting import planned

    with tempfile.TemporaryDirectory() as folder:
        return planned(configuration(name, Path(folder)), Bucket(SIDE, SIDE))


def main() -> int:
    """Print a line for each recipe, and say whether it fits."""
    from difftrain.train.estimate.footprint import GIB

    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--write", action="store_true")
    words.add_argument("names", nargs="*")
    options = words.parse_args()
    rows, missed = [], False
    for name in NAMES:
        if options.names and not any(part in name for part in options.names):
            continue
        made = plan(name)
        cfg, total, most = made.cfg, made.total / GIB, made.cfg.memory.memory_gib
        missed |= total > most
        rows.append(
            f"| `configs/presets/{name}.toml` | {cfg.model.base_dtype or 'bf16'} | {cfg.memory.swap_blocks or ''} "
            f"| {cfg.training.batch_size} | {total:.1f} of {most:g} |"
        )
        print(rows[-1], flush=True)
    if options.write and not options.names:
        page = PAGE.read_text(encoding="utf-8")
        table = [
            "| recipe | frozen blocks in | blocks that wait | images per step | planned, GiB |",
            "|---|---|---|---|---|",
        ]
        before, _, rest = page.partition(HEAD)
        PAGE.write_text(
            f"{before}{HEAD}\n\n" + "\n".join([*table, *rows]) + f"\n\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
