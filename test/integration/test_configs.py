"""Every recipe of configs/ runs for two steps on a tiny stand-in, by overrides of the command line alone."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from doors import Door, write_pictures
from sd3_speedups import vision_folder

from difftrain.demo.model import write_tiny
from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted(
    p.relative_to(CONFIGS).as_posix() for p in CONFIGS.glob("*/*.toml") if b"[[directory]]" not in p.read_bytes()
)
# recipes by the memory of a device differ in few keys: one of each kind runs, all are parsed by test_fit.py
SIZED = {"sdxl/24gb.toml", "sdxl/32gb.toml", "sd3_light/24gb.toml", "sd3_light/40gb.toml"}
RECIPES = [name for name in RECIPES if not name.endswith("gb.toml") or name in SIZED]
RECIPES = [
    name for name in RECIPES if name not in {f"{family}/tiny.toml" for family in FAMILIES}
]  # test_family_runs.py
# of this door; the other files of configs/sdxl have it in their own keys
KOHYAS = {"sdxl/base.toml", "sdxl/pretrain_tiny.toml"}
COMMON = ("--training.max_steps=2", "--training.micro_batch_size_per_gpu=2", "--model.dtype=float32",
          "--data.num_dataloader_workers=0", "--monitoring.logging_steps=1")  # fmt: skip
LIGHT = ("--model.t5_max_length=8", "--model.num_layers=3")
# folder of recipes -> the family whose tiny model stands in
STAND_INS = {"sd3_light": "sd3"} | {name: name for name in FAMILIES if FAMILIES[name].has("model.transformer")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, data set files and tiny models that stand in for what recipes name."""
    folder = tmp_path_factory.mktemp("stand-in")
    write_pictures(folder / "pictures", 6)
    text = f'resolutions = [64]\n[[directory]]\npath = "{folder / "pictures"}"\n'
    (folder / "data.toml").write_text(text)
    (folder / "pairs.toml").write_text(f'{text}control_path = "{folder / "pictures"}"\n')  # each is edited into itself
    for family in STAND_INS.values():
        write_tiny(folder / family, family)
        if "model.expert" in FAMILIES[family].takes:  # of either expert
            shutil.copytree(folder / family / "transformer", folder / family / "transformer_2")
    return folder


def overrides(name: str, place: Path, out: Path) -> list[str]:
    words = _overrides(name, place, out)
    if name in SIZED:  # weights in half precision are computed in it
        words = [word for word in words if "cache_dir" not in word]
        words += ["--model.dtype=bfloat16", f"--data.cache_dir={out.parent / 'cache'}"]
    return words


def _overrides(name: str, place: Path, out: Path) -> list[str]:
    data = [f"--dataset={place / 'data.toml'}", f"--output.output_dir={out}"]
    folder = name.partition("/")[0]
    if folder in STAND_INS:
        tables = tomllib.loads((CONFIGS / name).read_text(encoding="utf-8"))
        row = FAMILIES[STAND_INS[folder]]
        edits = bool(row.control and (row.control_least or tables.get("data", {}).get("num_control")))
        file = place / ("pairs.toml" if edits else "data.toml")
        data[0] = f"--dataset={file}"
        words = [
            *data,
            *COMMON,
            *(LIGHT if folder == "sd3_light" else LIGHT[: FAMILIES[folder].has("model.t5_max_length")]),
            f"--model.diffusers_path={place / STAND_INS[folder]}",
            f"--data.cache_dir={place / 'cache'}",
        ]
        if "llama3_path" in tables["model"]:
            words.append(f"--model.llama3_path={place / STAND_INS[folder] / 'text_encoder_4'}")
        if "llm_max_length" in tables["model"]:  # of the demo's vocabulary: the stand-in's spells a template in letters
            words.append("--model.llm_max_length=512")
        words += ["--demo.score=false"] if "score" in tables.get("demo", {}) else []
        if "eval" in tables:
            sets = f'[{{name = "unseen", config = "{file}"}}]'
            words += [f"--eval.eval_datasets={sets}", "--eval.eval_before_first_step=false"]
        if "sample" in tables:
            reference = next((place / "pictures").glob("*.png")) if edits else ""
            (place / "prompts.txt").write_text(f"a picture --w 64 --h 64 --s 2{f' --ci {reference}' * edits}\n")
            words.append(f"--sample.prompts={place / 'prompts.txt'}")
        if "repa" in tables:
            words += [f"--repa.encoder={vision_folder(place / 'vision', 'dinov2')}", "--repa.layer=2"]
        if "ema" in tables:
            words.append("--ema.update_every=1")
        return words
    if name in KOHYAS:
        sizes = ["--data.resolution=[64, 64]", "--data.min_bucket_reso=32", "--data.max_bucket_reso=128"]
        return [*sizes, f"--data.dirs=['{place / 'pictures'}']", f"--output.output_dir={out}", *COMMON]
    return [*data, *COMMON]


# families whose tiny recipe runs whole beside it (test_family_runs.py), or whose sibling's recipe runs here
NIGHTLY = {
    f"{family}/base.toml" for family in ("flux", "flux2_klein", "qwen_image_edit_plus", "wan_flf2v", "wan_2_2_i2v")
}
NIGHTLY |= {"wan_2_2_i2v/low.toml", "wan_2_2_i2v/tiny.toml", "wan_flf2v/tiny.toml", "wan_2_2_5b/tiny.toml"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in RECIPES]
)
def test_two_steps(name: str, place: Path, tmp_path: Path) -> None:
    file = CONFIGS / name
    if (
        name.startswith("sdxl/") and "init_from_config" not in file.read_text()
    ):  # no override takes a user's weights back
        text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("checkpoint_path"))
        file = tmp_path / "recipe.toml"
        file.write_text(text.replace("[model]", '[model]\ninit_from_config = "tiny"'))
    door = Door(place / "pictures", place / "user_cache")
    words = [sys.executable, str(ROOT / "sd_scripts_xl" / "train.py"), f"--config={file}"]
    said = door.run_words([*words, *overrides(name, place, tmp_path / "runs")], timeout=400)
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1, said
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert (runs[0] / "config.toml").exists() and (runs[0] / "report.json").exists()


def test_tiny_runs_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    door = Door(tmp_path, tmp_path / "user_cache")
    run = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    words = ["-m", "difftrain", "train", f"--config={CONFIGS / 'sd3_light' / 'tiny.toml'}"]
    env = {"PYTHONPATH": str(ROOT / "library")}  # for processes that ranks start
    said = door.run_words([sys.executable, *run, *words, "--training.max_steps=2"], timeout=400, **env)
    assert len(re.findall(r"tiny: making .*demo", said)) == 1, said  # one of the two processes makes it
    place = tmp_path / "output" / "sd3_light" / "tiny"
    assert {"model", "pictures", "train.toml", "cache", "runs"} <= {path.name for path in place.iterdir()}
    again = door.run_words([sys.executable, *words, "--training.max_steps=2", "--dry_run"], **env)
    assert "tiny: making" not in again and "steps: 2 in " in again


def test_there_are_recipes() -> None:
    names = {name.partition("/")[2] for name in RECIPES if name.startswith("sd3_light/")}
    assert names >= {"cache.toml", "base.toml", "txt.toml", "txt_multi.toml", "tiny.toml"}
    assert len(RECIPES) >= 9
