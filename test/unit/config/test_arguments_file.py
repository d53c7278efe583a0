"""kohya's TOML of arguments: read under the command line, written by --output_config."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config.door import open_door
from difftrain.config.parse_flags import Parsed, parse
from difftrain.contracts import ConfigFault


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    return [
        "--init_from_config=tiny",
        f"--train_data_dir={tmp_path / 'data'}",
        f"--output_dir={tmp_path / 'out'}",
        "--resolution=64,64",
    ]


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "args.toml").write_text(text)
    return f"--config_file={tmp_path / 'args'}"  # kohya: the suffix need not be written


def faults(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse(argv)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.flags("config_file")
def test_tables_are_flattened_and_the_command_line_wins(line: list[str], tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'seed = 7\n[training]\nmax_train_epochs = 3\nlr_warmup_steps = "10%"\nshuffle_caption = true\nflip_aug = false\n'
        'optimizer_args = ["eps=1e-6", "betas=(0.8,0.9)"]\n[more]\nlearning_rate = 3e-5\n',
    )
    cfg = parse([*line, file, "--max_train_epoch=5", "--seed=8", "--lr_scheduler=linear"]).config
    assert (cfg.training.max_epochs, cfg.training.seed) == (5, 8)  # also by another name of the same field
    assert cfg.captions.shuffle and not cfg.data.flip
    assert cfg.optimizer.warmup_steps == 0.1 and cfg.optimizer.learning_rate == 3e-5
    assert cfg.optimizer.args == ("eps=1e-6", "betas=(0.8,0.9)")


def test_every_fault_of_a_file_is_named_with_its_place(line: list[str], tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'sed = 1\nflip_aug = "yes"\nmax_train_steps = "many"\ntrain_batch_size = [1, 2]\nv2 = true\ndry_run = true\n'
        "[a]\nseed = 1\n[b]\nseed = 2\n",
    )
    said = faults([*line, file])
    path = str(tmp_path / "args.toml")
    assert len(said) == 7 and all(path in each for each in said), said
    for key in ("sed", "flip_aug", "max_train_steps", "train_batch_size", "v2", "dry_run", "seed"):
        assert any(f"{path} {key}" in each for each in said), key
    assert is_about(next(each for each in said if f"{path} sed:" in each), f"{path} sed", "seed")


def test_a_missing_or_broken_file_is_named(line: list[str], tmp_path: Path) -> None:
    (missing,) = faults([*line, f"--config_file={tmp_path / 'nowhere.toml'}"])
    (broken,) = faults([*line, written(tmp_path, "seed = \n")])
    assert "nowhere.toml" in missing and is_about(missing, "--config_file", "file")
    assert "args.toml" in broken and is_about(broken, "--config_file", "TOML", "line 1")


@pytest.mark.flags("output_config")
def test_what_is_written_reads_back_the_same(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    more = ["--lr_warmup_steps=0.25", "--lr_scheduler=linear", "--flip_aug", "--optimizer_args", "eps=1e-6"]
    more += ['--metadata_title=a "b" ü', "--dataset_repeats=3", "--lr_decay_steps=10%", "--wandb_api_key=secret123"]
    argv = [*line, *more]
    target = tmp_path / "new" / "mine.toml"

    def never(parsed: Parsed) -> int:
        raise AssertionError("nothing is to be trained")

    assert open_door("door", [*argv, f"--config_file={target}", "--output_config"], never) == 0
    assert str(target) in capsys.readouterr().out
    assert "secret123" not in target.read_text()
    assert parse([f"--config_file={target}"]).config == parse(argv).config
    assert open_door("door", [*argv, f"--config_file={target}", "--output_config"], never) == 2
    assert names(capsys.readouterr().err, target, "--output_config")
    assert is_about(faults([*line, "--output_config"])[0], "--output_config", "--config_file")
