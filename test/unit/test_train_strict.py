"""train.py's configuration takes nothing that it does not know, and names every fault by its place, all at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from difftrain.config.parse import Parsed
from difftrain.config.train_line import parse
from difftrain.contracts import ConfigFault
from difftrain.testing.pictures import write_folder

TOP = 'output_dir = "out"\ndataset = "dataset.toml"\nepochs = 2\n'
MODEL = '[model]\ntype = "sdxl"\ninit_from_config = "tiny"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    write_folder(tmp_path / "pictures", [(64, 64)] * 2)
    (tmp_path / "dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    return tmp_path


def read(text: str = "", *argv: str, flat: str = "") -> Parsed:
    Path("run.toml").write_text(TOP + flat + MODEL + text)
    return parse(["--config=run.toml", *argv])


def faults(text: str = "", *argv: str, flat: str = "") -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        read(text, *argv, flat=flat)
    return [str(fault) for fault in caught.value.faults]


# names that end like a secret's


@pytest.mark.parametrize(
    ("text", "argv", "flat", "says"),
    [
        ("[monitoring]\nwandb_api_kye = 'SECRETSECRET'\n", (), "", "[monitoring] wandb_api_kye: no such key (did you mean wandb_api_key?)"),
        ("[monitoring]\nwandb_key = 'SECRETSECRET'\n", (), "", "[monitoring] wandb_key: no such key (did you mean wandb_api_key?)"),
        ("[save]\nhub_token = 'SECRETSECRET'\n", (), "", "[save] hub_token: no such key (did you mean hf_token?)"),
        ("[optimizer]\napi_key = 'SECRETSECRET'\n", (), "", "[optimizer] api_key: no such key"),
        ("[optimizer]\nnote = 'hf_SECRETSECRETSECRET'\n", (), "", "[optimizer] note: no such key"),
        ("", (), "my_password = 'SECRETSECRET'\n", "my_password: no such key"),
        ("[whatever]\nx_token = 'SECRETSECRET'\n", (), "", "[whatever]: no such table"),
        ("", ("--monitoring.other_token=SECRETSECRET",), "", "--monitoring.other_token: no such key"),
        ("", ("--whatever.other_token", "SECRETSECRET"), "", "--whatever.other_token: no such table"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_no_secret(text: str, argv: tuple[str, ...], flat: str, says: str) -> None:
    before = dict(os.environ)
    (said,) = faults(text, *argv, flat=flat)
    assert says in said and "SECRET" not in said and dict(os.environ) == before


# arguments of the optimizer's constructor


def test_arguments_of_the_optimizer_are_faults_of_their_place() -> None:
    text = "[optimizer]\ntype = 'adamw'\nbeta = [0.9, 0.99]\neps = 'small'\nmax_steps = 4\nlearning_rat = 1\nweight_decay = nan\n"
    said = faults(text, "--optimizer.amsgra=true", "--training.seed=x", "--optimizer.betas=1")
    expected = [
        "run.toml [optimizer] beta: adamw takes no beta (did you mean betas?)",
        "run.toml [optimizer] eps: adamw's eps must be a number, got 'small'",
        "run.toml [optimizer] max_steps: has no place in [optimizer]: adamw takes no max_steps (it belongs in [training])",
        "run.toml [optimizer] learning_rat: adamw takes no learning_rat (did you mean learning_rate?)",
        "run.toml [optimizer] weight_decay: adamw's weight_decay must be a number, got nan",
        "--optimizer.amsgra: adamw takes no amsgra (did you mean amsgrad?)",
        "--optimizer.betas: adamw's betas must be 2 numbers, got 1",
    ]
    assert all(any(line in each for each in said) for line in expected), said
    assert len(said) == len(expected) + 1  # and the seed


def test_a_package_that_is_missing_is_the_only_fault_of_its_optimizer() -> None:
    (said,) = faults("[optimizer]\ntype = 'no_such_package_x.Adam'\nanything = 1\n")
    assert (
        "[optimizer] type: no_such_package_x.Adam is in the package no_such_package_x, which is not installed" in said
    )
    (said,) = faults("[optimizer]\nscheduler_type = 'no_such_package_x.Step'\nscheduler_args = ['a=1']\n")
    assert "[optimizer] scheduler_type: no_such_package_x.Step is in the package" in said


def test_arguments_of_the_schedule_and_of_a_runs_own_record() -> None:
    said = faults(
        "[optimizer]\nscheduler_args = ['num_cycle=1']\nargs = ['beta=1']\n[training]\nlr_scheduler = 'cosine'\n"
    )
    assert "run.toml [optimizer] args: AdamW takes no beta (did you mean betas?)" in said[0]
    assert "run.toml [optimizer] scheduler_args: cosine takes no num_cycle (did you mean num_cycles?)" in said[1]


def test_half_life_needs_betas() -> None:
    (said,) = faults("[optimizer]\ntype = 'SGD'\nbeta2_half_life = 100\n")
    assert "[optimizer] beta2_half_life: SGD takes no betas" in said


# data sets


@pytest.mark.parametrize(
    ("own", "batch", "says"),
    [
        ("", 8, "are not for kohya's data sets: those without batch_size take the largest, 8"),
        ("batch_size = 3", 3, "have no effect: every data set here has batch_size"),
    ],
)
def test_what_becomes_of_pairs_beside_kohyas_file(own: str, batch: int, says: str) -> None:
    Path("kohya.toml").write_text(
        f"[[datasets]]\nresolution = 64\n{own}\n[[datasets.subsets]]\nimage_dir = 'pictures'\n"
    )
    parsed = read("[training]\nmicro_batch_size_per_gpu = [[32, 8], [64, 4]]\n", "--dataset=kohya.toml")
    assert parsed.config.data.datasets[0].batch_size == batch
    assert [note for note in parsed.notes if "by resolution" in note] == [
        f"kohya.toml: batch sizes by resolution {says}"
    ]
