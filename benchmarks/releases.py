"""Figures of released models: python benchmarks/releases.py [FAMILY ...] counts them and writes the pages of docs/models.

Reads library/difftrain/models/releases/FAMILY.json, which says by hand what was released, and adds to it, without a
device and without weights: parameters, operations of an image, memory of a step on one device (what `--dry_run` says),
and what tests compare with diffusers (test/support/family_oracles). Then docs/models/README.md and docs/zh/models.md are
written from all files. --pages: these alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "test" / "support")]
# one image a micro batch, everything cached: docs/models/README.md says so above the table
SECTIONS = {
    "training": {"mixed_precision": "bf16", "gradient_checkpointing": True, "batch_size": 1},
    "optimizer": {"type": "AdamW"},
}
# what a LoRA's base is held in -> further settings of its column
LORA = {
    f"lora_{dtype}": {"adapter": {"type": "lora", "rank": 16}, "model": {"base_dtype": dtype}}
    for dtype in ("bf16", "fp8")
}


def sizes_of(name: str, release: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a release's parts: a shipped size, or the tiny one with other numbers.

    The denoiser's are a release's config.json: what is not in them is its class's default. Of the other parts only the
    widths that the denoiser reads are needed, since their outputs are cached.
    """
    from difftrain.models.registry import FAMILIES

    shipped = ROOT / "library" / "difftrain" / "models" / "sizes_shipped"
    content = json.loads((shipped / f"{name}.{release.get('size', 'tiny')}.json").read_text(encoding="utf-8"))
    for part, section in release.get("sizes", {}).items():
        content[part] = dict(section) if part == FAMILIES[name].denoiser else merged(content[part], section)
    return content


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one section over another, tables within it too."""
    both = {key: merged(under[key], value) for key, value in over.items() if isinstance(value, dict) and key in under}
    return {**under, **over, **both}


def made(name: str, release: Mapping[str, Any], folder: Path, more: Mapping[str, Any] | None = None) -> Any:
    """Make the family of a release, with the family's defaults and the settings of the table; more: sections beside these."""
    from difftrain.config import TrainConfig
    from difftrain.models.registry import FAMILIES, make_family

    file = folder / f"{name}.json"
    file.write_text(json.dumps(sizes_of(name, release)), encoding="utf-8")
    values: dict[str, Any] = {"model": {"family": name, "init_from_config": str(file)}}
    values |= {section: dict(fields) for section, fields in SECTIONS.items()}
    for path, value in FAMILIES[name].defaults.items():
        section, _, field = path.partition(".")
        values.setdefault(section, {}).setdefault(field, value)
    values = merged(values, more or {})
    return make_family(TrainConfig.model_validate(values))


def counted(name: str, release: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Count a release: parameters of its denoiser, operations of an image, bytes between steps and of a step; of LoRAs in all."""
    from difftrain.contracts import Bucket
    from difftrain.train.estimate.footprint import device_memory

    def loaded(more: Mapping[str, Any]) -> tuple[Any, Any]:
        family = made(name, release, folder, more)
        parts = family.load(meta=True)
        parts.offloaded |= set(parts.frozen)
        return family, parts

    family, parts = loaded({})
    bucket = Bucket(*release["size_hw"], release.get("frames", 1))

    def total(family: Any, parts: Any) -> float:
        return device_memory(family.cfg, family, parts, 1, bucket, 1).total

    parameters = sum(weight.numel() for weight in parts.root.get_submodule(family.denoiser).parameters())
    flops = family.flops_per_sample(parts, bucket)
    memory = device_memory(family.cfg, family, parts, 1, bucket, 1)
    return {
        "parameters": parameters,
        "flops": round(flops),
        "standing": round(memory.standing),
        "step": round(memory.total - memory.standing),
        **{key: round(total(*loaded(more))) for key, more in LORA.items()},
    }


def compared(name: str) -> dict[str, Any]:
    """Say what tests compare with diffusers: by the oracle that they take."""
    import importlib

    oracle = importlib.import_module(f"family_oracles.{name}").ORACLE
    return {
        "forward": True,
        "captions": oracle.prompts is not None or oracle.shown is not None,
        "tensors": {release: count for release, (_, count) in oracle.released.items()},
        "whole": bool(oracle.whole),
        "samples": oracle.drawn is not None,
    }


def text_of(content: Mapping[str, Any]) -> str:
    """Write a file of releases, short lists in one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text) + "\n"


def main() -> int:
    """Count and write."""
    from difftrain.config.render.docs import PAGES
    from difftrain.config.render.model_pages import CHINESE, ENGLISH, RELEASES

    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--pages", action="store_true")
    words.add_argument("families", nargs="*", default=[])
    options = words.parse_args()
    names = options.families or sorted(file.stem for file in RELEASES.glob("*.json"))
    for name in [] if options.pages else names:
        file = RELEASES / f"{name}.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            for key, release in content["releases"].items():
                release["counted"] = counted(name, release, Path(folder))
                print(name, key, release["counted"], flush=True)
        content["compared"] = compared(name)
        file.write_text(text_of(content), encoding="utf-8")
    for page, language in (("models", ENGLISH), ("models_zh", CHINESE)):
        (ROOT / "docs" / language.page).write_text(PAGES[page](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
