"""Command lines: the contract line, kohya's spellings, and every way to get one wrong, all reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config import parse_keys
from difftrain.config.parse_flags import Parsed, parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts import ConfigFault
from difftrain.optim import schedule


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    """Return the contract line of the issue, without its cadence."""
    (tmp_path / "data").mkdir()
    return [
        "--init_from_config=tiny",
        f"--train_data_dir={tmp_path / 'data'}",
        f"--output_dir={tmp_path / 'out'}",
        "--output_name=NAME",
        "--resolution=64,64",
        "--enable_bucket",
        "--min_bucket_reso=32",
        "--max_bucket_reso=128",
        "--train_batch_size=2",
        "--max_train_steps=12",
        "--learning_rate=1e-4",
        "--seed=1",
    ]


def faults(argv: list[str]) -> list[str]:
    """Return the sentences of a command line that must fail."""
    with pytest.raises(ConfigFault) as caught:
        parse(argv)
    assert caught.value.exit_code == 2
    return [str(fault) for fault in caught.value.faults]


def only_fault(argv: list[str]) -> str:
    found = faults(argv)
    assert len(found) == 1, found
    return found[0]


def test_epochs_are_kohyas_with_his_flags_and_of_whole_batches_with_train_py(line: list[str], tmp_path: Path) -> None:
    assert parse(line).config.data.epoch_batches == "every"
    assert parse([*line, "--epoch_batches=whole"]).config.data.epoch_batches == "whole"
    # tars that are read in sequence come in whole batches
    assert parse([*line, "--tar_order=sequential"]).config.data.epoch_batches == "whole"
    fault = only_fault([*line, "--tar_order=sequential", "--epoch_batches=every"])
    assert "--epoch_batches" in fault and "--tar_order=random" in fault

    recipe = tmp_path / "run.toml"
    for setting, kind in (("", None), ('epoch_batches = "every"', "every")):
        data = f'dirs = ["{tmp_path / "data"}"]\nresolution = 64\n{setting}'
        recipe.write_text(
            f'[model]\ninit_from_config = "tiny"\n[training]\nmax_steps = 3\n[data]\n{data}\n[save]\noutput_dir = "{tmp_path}/out"\n'
        )
        assert parse_keys.parse([f"--config={recipe}"]).config.data.epoch_batches == kind


def test_the_contract_line(line: list[str], tmp_path: Path) -> None:
    parsed = parse([*line, "--save_every_n_steps=4", "--save_state", "--log_every=1"])
    cfg = parsed.config
    assert cfg.model.init_from_config == "tiny"
    assert cfg.data.dirs == (str(tmp_path / "data"),)
    assert cfg.data.resolution == (64, 64) and cfg.data.enable_bucket
    assert (cfg.data.min_bucket_reso, cfg.data.max_bucket_reso, cfg.data.bucket_reso_steps) == (32, 128, 64)
    assert (cfg.training.batch_size, cfg.training.max_steps, cfg.training.seed) == (2, 12, 1)
    assert cfg.optimizer.learning_rate == 1e-4
    assert (cfg.save.every_n_steps, cfg.save.state, cfg.save.output_name) == (4, True, "NAME")
    assert cfg.logging.log_every == 1 and not parsed.notes and not parsed.dry_run


def test_both_spellings_give_one_configuration(line: list[str]) -> None:
    spaced = [word for flag in line for word in flag.split("=", 1)]
    assert parse(spaced).config == parse(line).config


LAUNCHER = """
    --train_batch_size=4 --mixed_precision=fp16 --resolution=1024,1024 --min_bucket_reso=512 --max_bucket_reso=2048
    --gradient_checkpointing --lr_scheduler=cosine_with_restarts --learning_rate=1e-6 --train_text_encoder
    --learning_rate_te1=1e-7 --learning_rate_te2=1e-7 --max_grad_norm=1 --seed=1 --shuffle_caption
    --optimizer_type=oss --enable_npu_flash_attention --max_train_epoch=120
"""


def test_the_launchers_recipe_is_the_committed_one(line: list[str]) -> None:
    recipe = Path(__file__).parents[3] / "configs" / "sdxl" / "base.toml"
    paths = [flag for flag in line if flag.split("=")[0] in ("--train_data_dir", "--output_dir", "--init_from_config")]
    by_flags = parse([*paths, "--enable_bucket", *LAUNCHER.split()]).config
    by_file = parse([*paths, f"--config={recipe}"]).config
    assert by_flags == by_file


SETS = [
    ("--v_parameterization", lambda c: c.model.prediction_type == "v_prediction"),
    ("--half_vae", lambda c: c.model.vae_fp32 is False),
    ("--no_half_vae", lambda c: c.model.vae_fp32 is True),
    ("--max_token_length=77", lambda c: c.model.max_token_length == 77),
    ("--max_token_length=225", lambda c: c.model.max_token_length == 225),
    ("--resolution=96", lambda c: c.data.resolution == (96, 96)),
    ("--resolution=96,64", lambda c: c.data.resolution == (96, 64)),
    ("--caption_extention=.cap", lambda c: c.captions.extension == ".cap"),
    ("--max_train_epoch=3", lambda c: c.training.max_epochs == 3),
    ("--max_train_epochs=3", lambda c: c.training.max_epochs == 3),
    ("--use_safetensors", lambda c: c.save.model_as == "safetensors"),
    ("--use_safetensors --save_model_as=ckpt", lambda c: c.save.model_as == "ckpt"),
    ("--save_model_as=ckpt --use_safetensors", lambda c: c.save.model_as == "ckpt"),
    ("--xformers --sdpa", lambda c: c.training.attention in ("xformers", "sdpa")),
    ("--lr_scheduler=cosine --lr_warmup_steps=100", lambda c: c.optimizer.warmup_steps == 100),
    ("--lr_scheduler=cosine --lr_warmup_steps=0.05", lambda c: c.optimizer.warmup_steps == 0.05),
    ("--lr_scheduler=cosine --lr_warmup_steps=5%", lambda c: c.optimizer.warmup_steps == 0.05),
    ("--optimizer_args weight_decay=0.1 betas=.9,.99", lambda c: c.optimizer.args == ("weight_decay=0.1", "betas=.9,.99")),
    ("--optimizer_args", lambda c: c.optimizer.args == ()),
    ("--optimizer_type= --lr_scheduler_type=", lambda c: (c.optimizer.type, c.optimizer.scheduler_type) == ("AdamW", "")),
    ("--optimizer_type=adamw", lambda c: c.optimizer.type == "adamw"),
    ("--optimizer_type=torch.optim.SGD", lambda c: c.optimizer.type == "torch.optim.SGD"),
    ("--keep_tokens 3", lambda c: c.captions.keep_tokens == 3 and not c.captions.shuffle),
    ("--resume=auto", lambda c: c.save.resume == "auto"),
    ("--use_ema --ema_decay=0.99", lambda c: c.ema.enable and c.ema.decay == 0.99),
    ("--seed=9223372036854775807", lambda c: c.training.seed == 2**63 - 1),
    ("--loss_type=l2 --noise_offset=0 --max_timestep=1000 --min_timestep=0", lambda c: True),
]  # fmt: skip


@pytest.mark.parametrize(("words", "holds"), SETS, ids=[words for words, _ in SETS])
def test_what_flags_set(line: list[str], words: str, holds) -> None:
    assert holds(parse([*line, *words.split()]).config)


def test_folders_add_up_and_repeats_follow(line: list[str], tmp_path: Path) -> None:
    for name in ("b", "c", "d"):
        (tmp_path / name).mkdir()
    several = [f"--train_data_dir={tmp_path / 'b'}", "--train_data_dir", str(tmp_path / "c"), str(tmp_path / "d")]
    cfg = parse([*line, *several, "--dataset_repeats", "1", "2", "3", "4"]).config
    assert [Path(folder).name for folder in cfg.data.dirs] == ["data", "b", "c", "d"]
    assert cfg.data.repeats == (1, 2, 3, 4)
    assert parse([*line, *several, "--dataset_repeats=1,2,3,4"]).config.data.repeats == (1, 2, 3, 4)
    assert parse([*line, *several, "--dataset_repeats=2"]).config.data.repeats == (2,)
    assert "2 numbers for 4 folders" in only_fault([*line, *several, "--dataset_repeats=2,2"])


def test_values_that_ask_for_what_is_done_anyway_change_nothing(line: list[str]) -> None:
    plain = parse(line).config
    for flag in FLAGS.values():
        for value in flag.passes if flag.status == "later" else ():
            assert parse([*line, f"--{flag.name}={value}"]).config == plain, flag.name


def test_all_faults_at_once(line: list[str]) -> None:
    found = faults(
        [
            *line,
            "--traain_batch_size=3",  # misspelt
            "--train_batch_size=0",  # out of range
            "--learning_rate=fast",  # no number
            "--save_precision=fp17",  # no choice
            "--network_dim=4",  # of another door
            "--v2",  # refused
            "--cache_latents=1",  # a switch with a value
            "--max_train_epoch=3",
            "--max_train_epochs=4",  # contradiction
            "--ema_decay=0.9",  # without its companion
            "--optimizer_type=AdamWW",  # unknown name
            "--lr_scheduler",  # value missing
        ]
    )
    starts = {sentence.split(":")[0] for sentence in found}
    expected = "traain_batch_size train_batch_size learning_rate save_precision network_dim v2 cache_latents"
    expected += " max_train_epochs ema_decay optimizer_type lr_scheduler"
    assert starts == {f"--{name}" for name in expected.split()} and len(found) == len(starts)


WRONG = [
    ("--shufle_caption", ["--shufle_caption", "--shuffle_caption"]),
    ("--max-train-steps=3", ["--max-train-steps", "--max_train_steps"]),
    ("--max_train_ste=3", ["--max_train_ste", "--max_train_steps"]),  # no prefix matching
    ("--zzz=3", ["--zzz", "--help"]),
    ("--seed=1.5", ["--seed", "whole number", "1.5"]),
    ("--seed=-1", ["--seed", "at least 0", "-1"]),
    ("--sample_every_n_steps=-inf", ["--sample_every_n_steps", "-inf"]),
    ("--seed 9223372036854775808", ["--seed", "below", "9223372036854775808"]),
    ("--seed=", ["--seed", "empty"]),
    ("--output_name=", ["--output_name", "empty"]),
    ("--seed", ["--seed", "missing"]),
    ("--seed --shuffle_caption", ["--seed", "missing"]),
    ("--train_batch_size=0", ["--train_batch_size", "at least 1", "got 0"]),
    ("--train_batch_size=two", ["--train_batch_size", "whole number", "'two'"]),
    ("--learning_rate=-1", ["--learning_rate", "at least 0", "-1"]),
    ("--learning_rate=nan", ["--learning_rate", "finite", "nan"]),
    ("--learning_rate=inf", ["--learning_rate", "finite", "inf"]),
    ("--caption_dropout_rate=1.5", ["--caption_dropout_rate", "at most 1", "1.5"]),
    ("--use_ema --ema_decay=1", ["--ema_decay", "below 1", "got 1"]),
    ("--min_snr_gamma=-1", ["--min_snr_gamma", "at least 0", "got -1"]),
    ("--loss_type=hubert", ["--loss_type", "l1, l2, huber, smooth_l1", "huber?"]),
    ("--min_timestep=1000", ["--min_timestep", "at most 999", "got 1000"]),
    ("--ema_profiles=0.05,0.3", ["--ema_profiles", "at most 0.28", "got 0.3"]),
    ("--validation_split=1", ["--validation_split", "below 1"]),
    ("--max_token_length=76", ["--max_token_length", "75, 77, 150, 225", "76"]),
    ("--mixed_precision=fp61", ["--mixed_precision", "no, fp16, bf16", "fp16?"]),
    ("--resize_interpolation=lancsoz", ["--resize_interpolation", "lanczos?"]),
    ("--engine=acelerate", ["--engine", "native, accelerate"]),
    ("--shuffle_caption=true", ["--shuffle_caption", "switch", "'true'"]),
    ("--shuffle_caption true", ["--shuffle_caption", "no value", "'true'"]),
    ("--seed 1 2", ["--seed", "one value", "'2'"]),
    ("--resolution=64x64", ["--resolution", "WIDTH,HEIGHT", "64x64"]),
    ("--resolution=64,64,64", ["--resolution", "WIDTH,HEIGHT"]),
    ("--lr_scheduler=cosine --lr_warmup_steps=1.5", ["--lr_warmup_steps", "whole number", "steps", "1.5"]),
    ("--lr_scheduler=cosine --lr_warmup_steps=-3", ["--lr_warmup_steps", "at least 0"]),
    ("--dataset_repeats=0", ["--dataset_repeats", "at least 1", "got 0"]),
    ("--dataset_repeats=1.5", ["--dataset_repeats", "whole number"]),
    ("--optimizer_args weight_decay", ["--optimizer_args", "key=value", "weight_decay"]),
    ("--optimizer_args weight_decay=0,,1", ["--optimizer_args", "literal"]),
    ("--optimizer_args eps=1 eps=2", ["--optimizer_args", "twice"]),
    ("--v2", ["--v2", "not offered", "Stable Diffusion 2"]),
    ("--no_half_vae --half_vae", ["--half_vae", "contradicts --no_half_vae"]),
    ("--half_vae --no_half_vae", ["--no_half_vae", "contradicts --half_vae"]),
    ("--caption_extension=.txt --caption_extention=.cap", ["--caption_extention", "contradicts --caption_extension"]),
    ("--", ["--", "--help"]),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[words for words, _ in WRONG])
def test_one_wrong_flag_is_one_fault_that_says_what_is_wrong(line: list[str], words: str, says: list[str]) -> None:
    sentence = only_fault([*line, *words.split(" ")])
    where, *facts = says
    assert sentence.partition(": ")[0].partition("=")[0] == where
    assert all(part in sentence.partition(": ")[2] for part in facts), sentence


def test_words_without_a_flag(line: list[str]) -> None:
    found = faults(["train", "-v", *line])
    assert len(found) == 2 and "'train'" in found[0] and "'-v'" in found[1]


def test_nothing_at_all_names_what_is_required() -> None:
    found = faults([])
    for flag in ("--output_dir", "--train_data_dir", "--resolution", "--pretrained_model_name_or_path"):
        assert any(sentence.startswith(f"{flag}: is missing") for sentence in found)
    assert len(found) == 4


def test_the_last_of_two_counts_and_is_said(line: list[str]) -> None:
    parsed = parse([*line, "--train_batch_size=5"])
    assert parsed.config.training.batch_size == 5
    assert any(names(note, "--train_batch_size", "twice", "5") for note in parsed.notes)
    assert not parse([*line, "--train_batch_size=2"]).notes


@pytest.mark.flags(
    "cache_info",
    "persistent_data_loader_workers",
    "lowram",
    "highvram",
    "xformers",
    "sdpa",
    "mem_eff_attn",
    "diffusers_xformers",
)
def test_nearest_meanings_are_said_once(line: list[str]) -> None:
    parsed: Parsed = parse([*line, "--xformers", "--lowram", "--cache_info", "--persistent_data_loader_workers"])
    for name in ("--xformers", "--lowram", "--cache_info", "--persistent_data_loader_workers"):
        assert sum(note.startswith(f"{name}:") for note in parsed.notes) == 1


def test_a_value_that_is_no_text_is_a_fault(line: list[str]) -> None:
    assert "not UTF-8" in only_fault([*line, "--log_prefix=\udcff"])


@pytest.mark.parametrize("name", ["train_data_dir", "reg_data_dir"])
def test_an_empty_folder_name_is_not_the_folder_one_is_in(line: list[str], name: str, tmp_path: Path) -> None:
    """What `--train_data_dir=$DATA` says where DATA is not set."""
    rest = [word for word in line if not word.startswith(f"--{name}=")]
    for given in ([f"--{name}="], [f"--{name}", str(tmp_path), ""]):
        assert is_about(only_fault([*rest, *given]), f"--{name}", "empty")


def test_a_resolved_configuration_is_frozen(line: list[str]) -> None:
    cfg: TrainConfig = parse(line).config
    with pytest.raises(ValueError, match="frozen"):
        cfg.training.batch_size = 3  # type: ignore[misc]


@pytest.mark.flags("lr_warmup_steps", "mask_mean")
def test_all_updates_as_a_share(tmp_path: Path) -> None:
    line = [
        "--init_from_config=tiny",
        "--train_data_dir=/",
        f"--output_dir={tmp_path}",
        "--resolution=64,64",
        "--lr_scheduler=linear",
    ]
    share = parse([*line, "--lr_warmup_steps=100%"]).config.optimizer.warmup_steps
    assert [schedule.updates(share, total) for total in (1, 3, 7919, 10**9)] == [1, 3, 7919, 10**9]
    assert schedule.updates(1, 100) == 1 and schedule.updates(0.1, 100) == 10
    with pytest.raises(ConfigFault) as caught:
        parse([*line, "--lr_warmup_steps=150%"])
    assert is_about(caught.value.faults[0], "--lr_warmup_steps", "100%", "'150%'")
    assert parse([*line, "--mask_mean=all"]).config.loss.mask_mean == "all"
