"""Flags that are sound one by one and wrong together; paths, names and packages that are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from refusals import is_about

from difftrain.config.parse_flags import parse
from difftrain.config.rules import optimizer, paths, run
from difftrain.config.rules.finding import value_of
from difftrain.config.rules.optimizer import one_of
from difftrain.config.schema import names
from difftrain.config.schema.validate import default_of, fields
from difftrain.config.spellings.flags import FLAGS
from difftrain.contracts import ConfigFault
from difftrain.models.registry import FAMILIES


@pytest.fixture
def line(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "data").mkdir()
    (tmp_path / "prompts.txt").write_text("a red star\n")
    return {
        "init_from_config": "tiny",
        "train_data_dir": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
        "resolution": "64,64",
    }


def words(line: dict[str, str], more: str = "") -> list[str]:
    return [f"--{name}={value}" for name, value in line.items()] + more.split()


def faults(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse(argv)
    return [str(fault) for fault in caught.value.faults]


TOGETHER = [
    ("--pretrained_model_name_or_path={here}", ["--init_from_config", "contradicts --pretrained_model_name_or_path"]),
    ("--resolution=60,64", ["--resolution", "32", "60,64"]),
    ("--enable_bucket --min_bucket_reso=128 --max_bucket_reso=64", ["--min_bucket_reso", "128 > 64"]),
    ("--enable_bucket --min_bucket_reso=32 --bucket_reso_steps=7", ["--bucket_reso_steps", "32", "7"]),
    ("--enable_bucket --min_bucket_reso=36", ["--min_bucket_reso", "8", "36"]),
    ("--enable_bucket --min_bucket_reso=128", ["--min_bucket_reso", "shorter", "--resolution", "128 > 64"]),
    ("--enable_bucket --min_bucket_reso=32 --max_bucket_reso=48", ["--max_bucket_reso", "longer", "--resolution", "48 < 64"]),
    ("--sample_prompts={here}/none.txt", ["--sample_prompts", "file", "none.txt"]),
    ("--sample_prompts={here}/prompts.yaml", ["--sample_prompts", "prompts.yaml", ".txt"]),
    ("--ema_decay=0.9", ["--ema_decay", "needs --use_ema"]),
    ("--validate_every_n_steps=4", ["--validate_every_n_steps", "needs --validation_split"]),
    ("--max_validation_steps=4", ["--max_validation_steps", "needs --validation_split"]),
    ("--validation_seed=4", ["--validation_seed", "needs --validation_split"]),
    ("--demo_score", ["--demo_score", "needs --demo"]),
    ("--no_metadata --metadata_title=x", ["--metadata_title", "contradicts --no_metadata"]),
    ("--lr_warmup_steps=10", ["--lr_warmup_steps", "warm-up", "--lr_scheduler=constant_with_warmup"]),
    ("--resume={here}/nowhere", ["--resume", "folder", "nowhere"]),
    ("--train_data_dir={here}/nowhere", ["--train_data_dir", "folder", "nowhere"]),
    ("--vae={here}/nowhere", ["--vae", "nowhere", "hub"]),
    ("--tokenizer1_path=./some/tokenizer", ["--tokenizer1_path", "some/tokenizer", "hub"]),
    ("--init_from_config=tny", ["--init_from_config", "size", "'tny'", "tiny"]),
    ("--init_from_config={here}/none.json", ["--init_from_config", "file", "none.json"]),
    ("--output_name=a/b", ["--output_name", "a/b", "--output_dir"]),
    ("--output_dir={here}/prompts.txt/x", ["--output_dir", "prompts.txt", "file"]),
    ("--console_log_file={here}/data", ["--console_log_file", "data", "folder"]),
    ("--console_log_file={here}/prompts.txt/x/log.txt", ["--console_log_file", "prompts.txt", "file"]),
    ("--logging_dir={here}/prompts.txt/x", ["--logging_dir", "prompts.txt", "file"]),
    ("--metadata_thumbnail={here}/none.png", ["--metadata_thumbnail", "file", "none.png", "data: URL"]),
    ("--metadata_thumbnail={here}/data", ["--metadata_thumbnail", "file", "data"]),
    ("--optimizer_type=AdamWW", ["--optimizer_type", "'AdamWW'", "AdamW"]),
    ("--lr_scheduler=cosin", ["--lr_scheduler", "'cosin'", "cosine"]),
    ("--lr_scheduler=adafactor", ["--lr_scheduler", "--optimizer_type=Adafactor"]),
    ("--lr_scheduler_type=1x", ["--lr_scheduler_type", "class", "'1x'"]),
    ("--sample_sampler=eulr_a", ["--sample_sampler", "'eulr_a'", "euler_a"]),
    ("--torch_compile --dynamo_backend=inductr", ["--dynamo_backend", "'inductr'", "inductor"]),
    ("--torch_compile --dynamo_backend=fx2trt", ["--dynamo_backend", "fx2trt", "torch"]),
    ("--log_tracker_config={here}/none.toml", ["--log_tracker_config", "file", "none.toml"]),
    ("--log_tracker_config={here}/prompts.txt", ["--log_tracker_config", "prompts.txt", "TOML", "line 1"]),
    ("--log_with=tensorbord", ["--log_with", "'tensorbord'", "tensorboard"]),
]  # fmt: skip


@pytest.mark.parametrize(("more", "facts"), TOGETHER, ids=[more for more, _ in TOGETHER])
def test_one_contradiction_is_one_fault(line: dict[str, str], tmp_path: Path, more: str, facts: list[str]) -> None:
    changed = {word[2:].split("=")[0] for word in more.split()}
    kept = {name: value for name, value in line.items() if name not in changed}
    found = faults(words(kept, more.format(here=tmp_path)))
    assert len(found) == 1, found
    assert is_about(found[0], *facts)


SAID = [
    ("--max_train_epochs=3 --max_train_steps=10", "--max_train_steps --max_train_epochs"),
    ("--max_train_epochs=9 --save_n_epoch_ratio=3 --save_every_n_epochs=1", "--save_every_n_epochs --save_n_epoch_ratio"),
    ("--min_bucket_reso=32", "--min_bucket_reso --enable_bucket"),
    ("--dynamo_backend=eager", "--dynamo_backend --torch_compile"),
    ("--lr_scheduler_power=2", "--lr_scheduler_power polynomial"),
    ("--lr_scheduler=cosine --lr_scheduler_num_cycles=2", "--lr_scheduler_num_cycles cosine_with_restarts"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "facts"), SAID, ids=[more for more, _ in SAID])
def test_what_kohya_lets_pass_is_said(line: dict[str, str], more: str, facts: str) -> None:
    assert any(is_about(said, *facts.split()) for said in parse(words(line, more)).notes)


PASSED_OVER = [
    ("--save_last_n_steps=100", "--save_last_n_steps --save_every_n_steps", "save.last_n_steps"),
    ("--save_last_n_epochs=2", "--save_last_n_epochs --save_every_n_epochs", "save.last_n_epochs"),
    ("--save_every_n_steps=4 --save_last_n_steps_state=8", "--save_last_n_steps_state --save_state", "save.last_n_steps_state"),
    ("--sample_every_n_steps=4", "--sample_every_n_steps --sample_prompts", "sample.every_n_steps"),
    ("--sample_at_first", "--sample_at_first --sample_prompts", "sample.at_first"),
    ("--learning_rate_te1=1e-5", "--learning_rate_te1 --train_text_encoder", "optimizer.learning_rate_te1"),
    ("--learning_rate_te2=0", "--learning_rate_te2 --train_text_encoder", "optimizer.learning_rate_te2"),
    ("--text_encoder_lr=1e-5", "--text_encoder_lr --train_text_encoder", "optimizer.text_encoder_lr"),
    ("--huggingface_path_in_repo=a", "--huggingface_path_in_repo --huggingface_repo_id", "hub.path_in_repo"),
    ("--conditioning_data_dir={here}", "--conditioning_data_dir --masked_loss", "data.conditioning_dir"),
    ("--in_json={here}/captions.json --reg_data_dir={here}", "--reg_data_dir --in_json", "data.reg_dirs"),
    ("--sample_every_n_steps=0", "--sample_every_n_steps 0", "sample.every_n_steps"),
    ("--sample_every_n_epochs=-1", "--sample_every_n_epochs -1", "sample.every_n_epochs"),
    ("--fused_optimizer_groups=0", "--fused_optimizer_groups 0", "optimizer.fused_groups"),
    ("--vae=", "--vae", "model.vae"),
    ("--network_dim=0", "--network_dim 0", ""),
]  # fmt: skip


@pytest.mark.parametrize(("more", "facts", "path"), PASSED_OVER, ids=[more for more, *_ in PASSED_OVER])
def test_what_kohyas_script_passes_over_is_said_and_counts_as_not_given(
    line: dict[str, str], tmp_path: Path, more: str, facts: str, path: str
) -> None:
    (tmp_path / "captions.json").write_text("{}")
    parsed = parse(words(line, more.format(here=tmp_path)))
    assert [note for note in parsed.notes if is_about(note, *facts.split())], parsed.notes
    assert not path or value_of(parsed.config, path) == default_of(path)


def test_a_file_of_datasets_wins_over_folders_of_the_line_which_need_not_be_there(
    line: dict[str, str], tmp_path: Path
) -> None:
    sets = tmp_path / "sets.toml"
    sets.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'data'}'\n")
    line |= {"dataset_config": str(sets), "train_data_dir": "/nowhere/a", "reg_data_dir": "/nowhere/b"}
    parsed = parse(words(line))
    for flag in ("--train_data_dir", "--reg_data_dir"):
        assert any(is_about(note, flag, "--dataset_config") for note in parsed.notes), flag
    assert parsed.config.data.dirs == parsed.config.data.reg_dirs == () and parsed.config.data.datasets


FINE = [
    "--max_train_steps=9 --save_n_epoch_ratio=3",
    "--keep_tokens=2",
    "--resume=auto",
    "--min_snr_gamma=5",
    "--min_snr_gamma=5 --v_parameterization",
    "--train_text_encoder --learning_rate_te1=1e-7 --learning_rate_te2=0",
    "--validation_split=0.1",
    "--validation_split=0.1 --validate_every_n_steps=4 --validation_seed=3 --max_validation_steps=2",
    "--save_every_n_epochs=1 --save_last_n_epochs=2",
    "--max_train_epochs=9 --save_n_epoch_ratio=3 --save_last_n_epochs=2",
    "--save_every_n_steps=4 --save_last_n_steps=8 --save_state --save_last_n_steps_state=8",
    "--sample_prompts={here}/prompts.txt --sample_every_n_steps=2 --sample_at_first --sample_sampler=k_dpm_2",
    "--lr_scheduler=constant_with_warmup --lr_warmup_steps=10",
    "--lr_scheduler_type=CosineAnnealingLR --lr_scheduler_args T_max=100",
    "--optimizer_type=OSS",
    "--log_with=tensorboard",
    "--torch_compile --dynamo_backend=INDUCTOR",
    "--console_log_file={here}/new/log.txt --logging_dir={here}/new/logs",
    "--console_log_file={here}/prompts.txt --metadata_thumbnail={here}/prompts.txt",
    "--metadata_thumbnail=data:image/png;base64,iVBORw0KGgo=",
]


@pytest.mark.parametrize("more", FINE)
def test_sound_combinations_pass_without_a_word(line: dict[str, str], tmp_path: Path, more: str) -> None:
    assert parse(words(line, more.format(here=tmp_path))).notes == ()


def test_a_tracker_that_is_not_installed_is_named(line: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(paths, "find_spec", lambda package: None)
    found = faults(words(line, "--log_with=all"))
    assert len(found) == 2 and "wandb" in found[0] and "tensorboard" in found[1]


def test_an_output_folder_that_cannot_be_written_to(line: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.os, "access", lambda path, mode: False)  # root may write anywhere
    (fault,) = faults(words(line))
    assert is_about(fault, "--output_dir", repr(str(Path(line["output_dir"]).parent)))


def test_logs_and_a_thumbnail_out_of_reach(
    line: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.os, "access", lambda path, mode: tmp_path not in (path, *Path(path).parents))
    here = tmp_path / "prompts.txt"
    found = faults(
        words(line, f"--console_log_file={here} --logging_dir={tmp_path / 'new'} --metadata_thumbnail={here}")
    )
    asked = ("--output_dir", "--console_log_file", "--logging_dir", "--metadata_thumbnail")
    assert [each.split(":")[0] for each in found] == list(asked)
    assert all(str(tmp_path) in each for each in found)


def test_a_rule_does_not_repeat_what_a_field_said(line: dict[str, str]) -> None:
    found = faults(words(line, "--enable_bucket --min_bucket_reso=0 --max_bucket_reso=128"))
    assert [sentence.split(":")[0] for sentence in found] == ["--min_bucket_reso"]


def test_rules_of_the_rooms_above_count_too(line: dict[str, str]) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse(words(line, "--device=gpx"), [one_of("training.device", ("auto", "gpu", "cpu"))])
    (fault,) = caught.value.faults
    assert is_about(fault, "--device", "'gpx'", "gpu")


def test_rules_name_fields_and_flags_that_exist() -> None:
    assert {need.field for need in run.NEEDS} <= set(fields())
    for module in (run, optimizer, paths):
        text = Path(module.__file__).read_text()
        assert {name.rstrip("_") for name in re.findall(r"--([a-z][a-z0-9_]+)", text)} <= set(FLAGS)
        sections = "|".join({path.split(".")[0] for path in fields()})
        for path in re.findall(rf'"((?:{sections})\.\w+)"', text):
            assert path in set(fields()), path


def test_names_are_those_that_the_rooms_build() -> None:
    from difftrain.optim.registry import REGISTRY
    from difftrain.optim.schedule import SCHEDULES

    assert set(names.OPTIMIZERS) == set(REGISTRY)
    assert set(names.SCHEDULERS) == {*SCHEDULES, "adafactor"}
    from difftrain.sampling import FLOW_SAMPLERS, SAMPLERS

    assert set(names.SAMPLERS) == set(SAMPLERS) and set(names.FLOW_SAMPLERS) == set(FLOW_SAMPLERS)
    assert set(names.PACKAGES) < set(names.OPTIMIZERS)


def test_sizes_are_those_that_ship() -> None:
    for family, row in FAMILIES.items():
        shipped = Path(run.__file__).parents[1] / "models" / family
        if any(shipped.glob("*.json")):  # other families have their sizes in their file
            assert {path.stem for path in shipped.glob("*.json")} == set(row.sizes)


def test_compile_backends_are_torchs() -> None:
    import torch

    there = set(torch._dynamo.list_backends(exclude_tags=()))
    assert set(names.COMPILE_BACKENDS) <= there and not set(names.COMPILE_BACKENDS_GONE) & there


@pytest.mark.parametrize("wrong", ["~nosuchuser/x", "q" * 300 + ".txt", "/" + "q" * 5000])
def test_names_that_no_disk_takes_are_faults_beside_others(line: dict[str, str], tmp_path: Path, wrong: str) -> None:
    named = ("train_data_dir", "conditioning_data_dir", "vae", "sample_prompts", "metadata_thumbnail", "resume")
    said = faults([*words(line | dict.fromkeys(named, wrong)), "--masked_loss"])
    for flag in named:
        assert any(each.startswith(f"--{flag}: ") and wrong[:50] in each for each in said), (flag, said)
    toml = tmp_path / "sets.toml"
    keys = "".join(f"{key} = '{wrong}'\n" for key in ("image_dir", "conditioning_data_dir"))
    toml.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\n{keys}")
    line.pop("train_data_dir")
    found = faults([*words(line), f"--dataset_config={toml}", "--masked_loss"])
    for key in ("image_dir", "conditioning_data_dir"):
        assert sum(is_about(fault, f"1 {key}", "folder") for fault in found) == 1, found
