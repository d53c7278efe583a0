"""`[demo] make`: what a recipe asks for before training, what the command line takes from it, and that it is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.train_line import parse
from difftrain.contracts import DataFault
from difftrain.train.demo import home, light, make

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "sd3_light"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return tmp_path


def wished(*extra: str, name: str = "tiny") -> tuple[str, ...]:
    wish = make.wished([f"--config={CONFIGS / f'{name}.toml'}", *extra])
    return wish.parts if wish else ()


@pytest.mark.parametrize("name", ["tiny", "shapes", "emoji"])
def test_what_is_missing_is_wished_for(name: str) -> None:
    assert wished(name=name) == ("model", "data")


def test_the_users_own_is_not_made() -> None:
    assert wished("--model.diffusers_path=/mine") == ("data",)
    assert wished("--dataset", "mine.toml") == ("model",)
    assert wished("--output.dataset=mine.toml", "--model.diffusers_path", "mine") == ()
    assert wished("--output.output_dir=elsewhere") == ("model", "data")


def test_nothing_else_is_looked_at() -> None:
    assert make.wished([]) is None and make.wished(["--config=none.toml"]) is None
    assert wished(name="base") == () and wished("--help") == ()


def test_the_tiny_folder_is_made_whole_and_once(here: Path) -> None:
    said: list[str] = []
    home.make("tiny", here / "t", 1.0, said.append, ("data",))
    stamp = (here / "t" / "pictures" / "train" / "000.png").stat().st_mtime_ns
    home.make("tiny", here / "t", 1.0, said.append, ("data",))
    assert len(said) == 1 and (here / "t" / "pictures" / "train" / "000.png").stat().st_mtime_ns == stamp
    assert str(here / "t" / "pictures" / "train") in (here / "t" / "train.toml").read_text()


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(DataFault, match="cannot be written"):
        home.make("tiny", here / "file" / "t", 1.0, lambda _: None, ("data",))


def test_other_processes_wait_until_it_is_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(make, "_WAIT_S", 0.0)
    assert make.make_demo([f"--config={CONFIGS / 'tiny.toml'}"]) == 2
    place = here / "output" / "sd3_light" / "tiny"
    (place / "model").mkdir(parents=True)
    (place / "train.toml").write_text("")
    assert make.make_demo([f"--config={CONFIGS / 'tiny.toml'}"]) == 0


@pytest.mark.parametrize("dataset", sorted(light.STEPS))
def test_the_launchers_plan_is_of_keys_that_there_are(dataset: str, here: Path) -> None:
    for kind, processes in (("cpu", 1), ("cpu", 8), ("cuda", 8)):
        plan = light.plan(dataset, kind, processes, 0.1)
        place = light.folder(dataset, 0.1)
        (place / "model").mkdir(parents=True, exist_ok=True)
        (place / "prompts.txt").write_text("a picture\n")
        for name in ("train", "unseen"):
            (place / f"{name}.toml").write_text(f'resolutions = [64]\n[[directory]]\npath = "{here}"\n')
        (here / "a.png").write_bytes(b"")
        words = [f"--{key}={value}" for key, value in plan.flags.items()]
        cfg = parse([f"--config={CONFIGS / f'{dataset}.toml'}", *words, f"--output.output_dir={here / 'o'}"]).config
        assert cfg.training.batch_size * processes == 32 and cfg.eval.sets[0].name == "unseen"
        assert cfg.training.mixed_precision == ("no" if kind == "cpu" else "bf16") and cfg.demo.score


def test_a_file_and_the_launchers_agree() -> None:
    for dataset, steps in light.STEPS.items():
        assert f"max_steps = {steps}\n" in (CONFIGS / f"{dataset}.toml").read_text(encoding="utf-8")
