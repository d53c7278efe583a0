"""`[demo] make`: what a recipe asks for before training, what the command line takes from it, and that it is made once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config.parse_flags import Parsed
from difftrain.config.parse_keys import open_train_door, parse
from difftrain.config.paths import expecting
from difftrain.contracts import ConfigFault, DataFault
from difftrain.demo import make, prepare
from difftrain.train.estimate.dry_run import dry_run

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "sd3_light"
RECIPES = {kind: CONFIGS / f"{kind}.toml" for kind in make.KINDS} | {
    "pairs": CONFIGS.parent / "flux_kontext" / "emoji.toml",
    "clips": CONFIGS.parent / "wan" / "emoji.toml",
}


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
    prepare.make("tiny", here / "t", 1.0, said.append, ("data",))
    stamp = (here / "t" / "pictures" / "train" / "000.png").stat().st_mtime_ns
    prepare.make("tiny", here / "t", 1.0, said.append, ("data",))
    assert len(said) == 1 and (here / "t" / "pictures" / "train" / "000.png").stat().st_mtime_ns == stamp
    assert (here / "t" / "train.toml").read_text() == make.data_text(here / "t" / "pictures" / "train")


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(DataFault, match=f"^{re.escape(str(here / 'file'))}"):
        prepare.make("tiny", here / "file" / "t", 1.0, lambda _: None, ("data",))


def test_other_processes_wait_until_it_is_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(make, "_WAIT_S", 0.0)
    coming = make.foreseen([f"--config={CONFIGS / 'tiny.toml'}"])
    assert coming is not None and coming.make() == 2
    place = here / "output" / "sd3_light" / "tiny"
    (place / "model").mkdir(parents=True)
    (place / "train.toml").write_text("")
    assert coming.make() == 0 and make.foreseen([f"--config={CONFIGS / 'tiny.toml'}"]) is None


# the door: what is judged before anything is made


def through_the_door(monkeypatch: pytest.MonkeyPatch, *argv: str, code: int = 0) -> tuple[int, list[str]]:
    """Return the exit code of a door whose making and work only say that they are asked to."""
    done: list[str] = []

    def at_work(parsed: Parsed) -> int:
        done.append("described" if parsed.coming else "trained")
        return 0

    def pretend(wish: make.DemoRequest, log: object) -> int:
        done.append("made")
        for part in wish.parts:
            folder = wish.folder / "model" if part == "model" else wish.folder / "pictures" / "train"
            folder.mkdir(parents=True)
        (wish.folder / "train.toml").write_text(make.data_text(wish.folder / "pictures" / "train"))
        return code

    monkeypatch.setattr(make, "_make", pretend)
    return open_train_door("train.py", list(argv), at_work, demo=make.foreseen), done


def test_a_sound_recipe_is_made_and_then_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert through_the_door(monkeypatch, f"--config={CONFIGS / 'tiny.toml'}") == (0, ["made", "trained"])


def test_a_demo_that_cannot_be_made_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="3"):
        through_the_door(monkeypatch, f"--config={CONFIGS / 'tiny.toml'}", code=3)


@pytest.mark.parametrize("name", make.KINDS)
@pytest.mark.parametrize("beside", [False, True])
def test_a_dry_run_makes_nothing(name: str, beside: bool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RECIPES[name]
    if beside:  # the recipe lies in the working directory
        path = Path(shutil.copy(path, here))
    before = sorted(here.iterdir())
    assert through_the_door(monkeypatch, f"--config={path.name if beside else path}", "--dry_run") == (0, ["described"])
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("words", [(), ("--dry_run",)])
def test_faults_come_before_anything_is_made(
    words: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ("--training.max_step=3", "--optimizer.beta=1", "--sample.prompts=output/sd3_light/shapes/prompt.txt")
    assert through_the_door(monkeypatch, f"--config={CONFIGS / 'shapes.toml'}", *bad, *words) == (2, [])
    said = capsys.readouterr().err
    _, *faults = said.splitlines()
    expected = (
        ("--training.max_step", "max_steps"),
        ("--optimizer.beta", "betas"),
        ("--sample.prompts", "'output/sd3_light/shapes/prompt.txt'"),
    )
    assert len(faults) == len(expected) and not list(here.iterdir())
    for facts in expected:
        assert any(is_about(fault, *facts) for fault in faults), (facts, said)


def test_a_dry_run_names_the_demo_and_judges_what_does_not_hang_on_it(here: Path) -> None:
    argv = [f"--config={CONFIGS / 'tiny.toml'}", "--output.output_dir=o"]
    coming = make.foreseen(argv)
    assert coming is not None
    said: list[str] = []
    with expecting(coming):
        assert dry_run(parse(argv).config, said.append, coming) == 0
        with pytest.raises(ConfigFault, match="--optimizer_args: AdamW"):
            dry_run(parse([*argv, "--optimizer.type=AdamW", "--optimizer.eps=-1"]).config, said.append, coming)
    assert any(names(line, "model", "data", "'tiny'", "output/sd3_light/tiny") for line in said)
    assert any(names(line, "nothing") for line in said) and not list(here.iterdir())


@pytest.mark.parametrize("dataset", sorted(make.STEPS))
def test_the_launchers_plan_is_of_keys_that_there_are(dataset: str, here: Path) -> None:
    for kind, processes in (("cpu", 1), ("cpu", 8), ("cuda", 8)):
        plan = make.plan(dataset, kind, processes, 0.1)
        place = make.folder(dataset, 0.1)
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
    for dataset, steps in make.STEPS.items():
        assert f"max_steps = {steps}\n" in (CONFIGS / f"{dataset}.toml").read_text(encoding="utf-8")
