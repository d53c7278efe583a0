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


SAVED_BY_THE_INTERFACE = """
adaptive_noise_scale = 0
bucket_reso_steps = 64
cache_latents = true
caption_extension = ".txt"
debug_dataset = false
dynamo_backend = "no"
enable_bucket = true
epoch = 10
full_bf16 = false
gradient_accumulation_steps = 1
huber_schedule = "snr"
learning_rate = 1e-5
learning_rate_te = 0
learning_rate_te1 = 5e-6
learning_rate_te2 = 5e-6
log_tracker_config = ""
lr_scheduler_args = []
lr_scheduler_type = ""
lr_warmup_steps = 0
max_train_epochs = 0
max_train_steps = 160
metadata_author = ""
min_bucket_reso = 32
mixed_precision = "no"
multires_noise_iterations = 0
multires_noise_discount = 0.3
network_dim = 0
no_token_padding = false
noise_offset = 0
noise_offset_type = "Original"
optimizer_args = []
optimizer_type = "AdamW"
prior_loss_weight = 1
reg_data_dir = ""
sample_every_n_epochs = 0
sample_every_n_steps = 0
sample_prompts = ""
sample_sampler = "euler_a"
save_every_n_steps = 0
save_last_n_steps = 0
save_last_n_steps_state = 0
some_key_of_next_year = false
training_comment = ""
v2 = false
vae = ""
wandb_run_name = "mine"
xformers = true
"""


@pytest.mark.flags("config_file", "dynamo_backend")
def test_settings_saved_by_the_graphical_interface_are_taken(line: list[str], tmp_path: Path) -> None:
    parsed = parse([*line, written(tmp_path, SAVED_BY_THE_INTERFACE)])
    cfg, path = parsed.config, str(tmp_path / "args.toml")
    assert (cfg.training.max_steps, cfg.training.max_epochs, cfg.optimizer.learning_rate) == (160, None, 1e-5)
    assert cfg.sample.every_n_steps is cfg.sample.prompts is cfg.save.every_n_steps is cfg.model.vae is None
    assert cfg.optimizer.learning_rate_te1 is None and not cfg.training.compile
    assert cfg.metadata.author is None and cfg.data.reg_dirs == ()
    for key in (
        "epoch",
        "noise_offset_type",
        "learning_rate_te1",
        "max_train_epochs",
        "sample_prompts",
        "some_key_of_next_year",
    ):
        assert any(is_about(note, f"{path} {key}") for note in parsed.notes), key


@pytest.mark.parametrize("value", ["false", '""', "0"])
@pytest.mark.parametrize(
    "key", ["vae", "save_every_n_epochs", "huggingface_repo_id", "network_module", "shufle_caption"]
)
def test_off_is_off_in_a_file(line: list[str], tmp_path: Path, key: str, value: str) -> None:
    if (key, value) in (("vae", "0"), ("huggingface_repo_id", "0")):
        pytest.skip("0 is a text there")
    parsed = parse([*line, written(tmp_path, f"{key} = {value}\n")])
    assert parsed.config == parse(line).config
    assert any(is_about(note, f"{tmp_path / 'args.toml'} {key}") for note in parsed.notes)


def test_a_switch_of_the_dataset_may_stand_in_the_file(line: list[str], tmp_path: Path) -> None:
    assert not parse([*line, written(tmp_path, "debug_dataset = false\n")]).debug_dataset
    assert parse([*line, written(tmp_path, "debug_dataset = true\n")]).debug_dataset


def test_a_file_that_is_too_deep_is_named(line: list[str], tmp_path: Path) -> None:
    (deep,) = faults([*line, written(tmp_path, f"seed = {'[' * 20000}{']' * 20000}\n")])
    assert is_about(deep, "--config_file", "TOML")
