"""Write docs/models/README.md and docs/zh/models.md: what families there are, from their rows and the figures of releases.

A release's figures are counted once (benchmarks/releases.py) and lie in models/releases/FAMILY.json, so that this reads
no torch. A family without such a file has "not counted" in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[4]
RELEASES = Path(__file__).resolve().parents[2] / "models" / "releases"
RECIPES = ("base", "tiny")
GIB = float(1 << 30)


@dataclass(frozen=True)
class Language:
    """A page in one language. page: below docs/. template: beside this file. words: the cells that are no numbers."""

    page: str
    template: str
    words: Mapping[str, str]
    comma: str = ", "

    def link(self, target: str) -> str:
        """Link a page below docs/ by its title, or a file of the checkout by its name."""
        here = (ROOT / "docs" / self.page).parent
        if target.endswith(".md"):
            page = ROOT / "docs" / target
            title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(":")[0]
            return f"[{title}]({relpath(page, here)})"
        return f"[`{Path(target).stem}`]({relpath(ROOT / target, here)})"


ENGLISH = Language(
    "models/README.md",
    "models.md",
    {
        "type": "`[model] type`", "title": "title", "task": "task", "trains": "trains", "multiple": "sides are multiples of",
        "sizes": "sizes of random models", "recipes": "recipes", "page": "page", "full": "full", "train_only": "a part of it",
        "encoders": "text encoders", "adapter": "adapters", "fp8": "frozen layers in 8 bits", "release": "release",
        "parameters": "parameters", "at": "image", "flops": "TFLOP an image", "standing": "between steps, GiB",
        "step": "one step, GiB", "total": "total, GiB", "lora_bf16": "LoRA, GiB", "lora_fp8": "LoRA, base in fp8, GiB",
        "licence": "licence", "see": "see the release",
        "uncounted": "not counted", "forward": "forward pass", "captions": "captions", "keys": "key names",
        "samples": "samples", "equal": "bit-equal", "pipeline": "the pipeline's", "equations": "our equations'", "whole": "a whole file",
        "tensors": "{} tensors", "own": "no table", "not": "no", "frames": "{} frames",
    },
)  # fmt: skip
CHINESE = Language(
    "zh/models.md",
    "models_zh.md",
    {
        "type": "`[model] type`", "title": "名称", "task": "任务", "trains": "可训练", "multiple": "边长须为其倍数",
        "sizes": "随机模型的规格", "recipes": "配方", "page": "页面（英文）", "full": "全量", "train_only": "部分权重",
        "encoders": "文本编码器", "adapter": "适配器", "fp8": "冻结层 8 位", "release": "发布版本",
        "parameters": "参数量", "at": "图片", "flops": "每张图 TFLOP", "standing": "步间常驻，GiB",
        "step": "一步，GiB", "total": "合计，GiB", "lora_bf16": "LoRA，GiB", "lora_fp8": "LoRA，基座 fp8，GiB",
        "licence": "许可证", "see": "见发布页",
        "uncounted": "未计算", "forward": "前向", "captions": "描述编码", "keys": "键名",
        "samples": "采样", "equal": "逐比特一致", "pipeline": "与 pipeline 一致", "equations": "与我们的公式一致", "whole": "整个文件",
        "tensors": "{} 个张量", "own": "无对照表", "not": "否", "frames": "{} 帧",
        "text-to-image": "文生图", "text-to-video": "文生视频", "image-to-video": "图生视频", "image-to-image": "图像编辑",
    },
    comma="、",
)  # fmt: skip


def page_in(language: Language) -> str:
    """Return the whole page."""
    template = (Path(__file__).parent / language.template).read_text(encoding="utf-8")
    return template.format(
        families=_table(language, _FAMILY_COLUMNS, _family_cells(language)),
        releases=_table(language, _RELEASE_COLUMNS, _release_cells(language)),
        compared=_table(language, _COMPARED_COLUMNS, _compared_cells(language)),
        init="\n".join(
            f"difftrain init {name} --size=tiny --output=models/{name} --seed=1"
            for name, row in FAMILIES.items()
            if "tiny" in row.sizes
        ),
        train="\n".join(
            f"python sd_scripts_xl/train.py --config configs/{name}/tiny.toml"
            f" --model.diffusers_path=models/{name} --training.max_steps=4"
            for name in FAMILIES
            if (ROOT / "configs" / name / "tiny.toml").is_file()
        ),
    )


def releases_of(name: str) -> dict[str, Any]:
    """Read the file of a family's releases: pages, releases by name, and what was compared. Empty where there is none."""
    file = RELEASES / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def pages_of(name: str) -> list[str]:
    """Name a family's pages, below docs/."""
    own = f"models/{name}.md"
    return releases_of(name).get("pages") or [own] * (ROOT / "docs" / own).is_file()


# --- The tables

_FAMILY_COLUMNS = ("type", "title", "task", "trains", "multiple", "sizes", "recipes", "page")
_RELEASE_COLUMNS = (
    "type", "release", "parameters", "at", "flops", "standing", "step", "total", "lora_bf16", "lora_fp8", "licence",
)  # fmt: skip
_COMPARED_COLUMNS = ("type", "forward", "captions", "keys", "samples")


def _family_cells(language: Language) -> Iterator[tuple[str, ...]]:
    for name, row in FAMILIES.items():
        recipes = [f"configs/{name}/{recipe}.toml" for recipe in RECIPES]
        yield (
            f"`{name}`",
            row.title,
            language.comma.join(language.words.get(task, task) for task in row.tasks),
            language.comma.join(language.words.get(kind, kind) for kind in row.trains),
            str(row.multiple),
            ", ".join(f"`{size}`" for size in row.sizes),
            ", ".join(language.link(recipe) for recipe in recipes if (ROOT / recipe).is_file()),
            ", ".join(map(language.link, pages_of(name))),
        )


def _release_cells(language: Language) -> Iterator[tuple[str, ...]]:
    words = language.words
    for name in FAMILIES:
        for release in releases_of(name).get("releases", {}).values():
            height, width = release["size_hw"]
            at = f"{width} x {height}"
            if "frames" in release:
                at += language.comma + words["frames"].format(release["frames"])
            yield (
                f"`{name}`",
                release["title"],
                *_figures(release.get("counted"), at, words["uncounted"]),
                release.get("licence") or words["see"],
            )
        if not releases_of(name).get("releases"):
            yield (f"`{name}`", FAMILIES[name].title, *_figures(None, "", words["uncounted"]), words["see"])


def _figures(counted: Mapping[str, float] | None, at: str, uncounted: str) -> tuple[str, ...]:
    """Write parameters, the image, operations, and memory: between steps, of a step and in all, and of LoRAs."""
    if counted is None:
        return (uncounted, at, *[uncounted] * 6)
    millions, tera = counted["parameters"] / 1e6, counted["flops"] / 1e12
    memory = (
        counted["standing"], counted["step"], counted["standing"] + counted["step"],
        counted["lora_bf16"], counted["lora_fp8"],
    )  # fmt: skip
    return (
        f"{millions / 1000:.2f} B" if millions >= 1000 else f"{millions:.0f} M",
        at,
        f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}",
        *(f"{size / GIB:.1f}" for size in memory),
    )


def _compared_cells(language: Language) -> Iterator[tuple[str, ...]]:
    words = language.words
    for name in FAMILIES:
        compared = releases_of(name).get("compared")
        if compared is None:
            yield (f"`{name}`", *["–"] * 4)
            continue
        tensors = list(dict.fromkeys(compared["tensors"].values()))
        if tensors:
            keys = words["tensors"].format(language.comma.join(map(str, tensors)))
        else:
            keys = words["whole" if compared["whole"] else "own"]
        theirs = words["pipeline" if FAMILIES[name].pipeline_module == "diffusers" else "equations"]
        yield (
            f"`{name}`",
            words["equal" if compared["forward"] else "not"],
            theirs if compared["captions"] else words["not"],
            keys,
            theirs if compared["samples"] else words["not"],
        )


def _table(language: Language, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (tuple(language.words[column] for column in columns), *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])
