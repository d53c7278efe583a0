"""train.py's configuration takes nothing that it does not know, and names every fault by its place, all at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from difftrain.config.parse_flags import Parsed
from difftrain.config.parse_keys import open_train_door, parse
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


# what nobody writes in earnest


def at_the_door(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return what a door says of a command line that it refuses: a line for each fault, and no traceback."""
    assert open_train_door("train.py", list(argv), lambda parsed: 0) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    count = len(rest)
    assert first == f"train.py: {count} fault{'s' if count > 1 else ''} in the configuration; nothing was started"
    return rest


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"epochs = 3 # \xff", "cannot be read as TOML"),
        ((TOP + MODEL).encode("utf-16"), "cannot be read as TOML"),
        (b"epochs = 3\0", "cannot be read as TOML"),
        (b"[training]\nmax_steps = 1\nmax_steps = 2\n", "Cannot overwrite a value (at line 3"),
        (None, "Is a directory"),
    ],
)
def test_a_config_that_cannot_be_read(
    content: bytes | None, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "x.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    (said,) = at_the_door(capsys, f"--config={path}")
    assert str(path) in said and says in said


STRANGE = """
training = []
[[model]]
type = "sdxl"
[[save]]
[optimizer]
eps = 99999999999999999999
note = "a\\u0000b"
[optimizer.deeper]
a = 1
[ema]
[data.cache]
[eval]
eval_datasets = [{name = 1, config = "dataset.toml"}, {name = "b", config = "nope.toml", nam = 2}]
"""


def test_strange_tables_and_values_are_told_all_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.toml").write_text(TOP + STRANGE)
    said = at_the_door(
        capsys, "--config=x.toml", "--training.max_steps", "--seed", "--dry_run=1", "--.epochs=3", "--training.seed=-1",
        "--save.output_name=a\udcff", "--training.max_steps=nan", "--metadata.title=a\0",
    )  # fmt: skip
    expected = [
        "x.toml training: is a table (write [training] above its keys)",
        "x.toml [model]: is a list of tables (it is one table: write [model])",
        "x.toml [save]: is a list of tables",
        "[optimizer] eps: is beyond the whole numbers of TOML",
        "[optimizer] note: holds what is no text",
        "[optimizer] deeper: AdamW takes no deeper",
        "[data] cache: no such key",
        "eval_datasets: 1: name must be text in quotes, got 1",
        "eval_datasets: 2: no such key: nam (did you mean name?)",
        "nope.toml: no such file",
        "--training.max_steps: its value is missing",
        "--seed: no such option (--training.seed sets that key)",
        "--dry_run: takes no value",
        "--.epochs: no such option",
        "--training.seed: must be at least 0",
        "--save.output_name: holds what is no text",
        "--training.max_steps: ",
        "--metadata.title: holds what is no text",
        "--model.diffusers_path: is missing",
    ]
    assert not [line for line in expected if not any(line in each for each in said)], said
    assert len(said) == len(expected)


@pytest.mark.parametrize("word", ["--dataset=\udcff", "--dataset=a\0", "--resume_from_checkpoint=a\0"])
def test_options_that_are_no_text(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(TOP + MODEL)
    (said,) = at_the_door(capsys, "--config=run.toml", word)
    assert "holds what is no text" in said


def test_a_batch_that_is_said_twice_is_one_fault() -> None:
    (said,) = faults("[training]\nmicro_batch_size_per_gpu = 3\n", flat="micro_batch_size_per_gpu = [[64, 2]]\n")
    assert "contradicts run.toml micro_batch_size_per_gpu: 3 here, [[64, 2]] there" in said


def test_a_family_that_is_not_built_hides_no_other_fault() -> None:
    Path("run.toml").write_text(
        TOP + "lr_scheduler = 'cosin'\n[model]\ntype = 'chroma'\n[optimizer]\ntype = 'SGD'\nmomentun = 0.9\n"
    )
    with pytest.raises(ConfigFault) as caught:
        parse(["--config=run.toml"])
    said = "\n".join(map(str, caught.value.faults))
    assert len(caught.value.faults) == 3 and "'chroma' is not built yet" in said
    assert "did you mean cosine?" in said and "did you mean momentum?" in said


@pytest.mark.parametrize("key", ["dataset", "eval"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('resolutions = [64]\n[[directory]]\npath = "a\\u0000b"\n', ["path: holds what is no text"]),
        ("resolutions = [64]\nhf_token = 'SECRETSECRET'\n[[directory]]\npath = 'pictures'\nfoo = 1\n",
         ["hf_token: no such key", "foo: no such key"]),
        ("[general]\nfoo = 1\n[[datasets]]\nresolution = 64\nbatchsize = 99999999999999999999\n[[datasets.subsets]]\n"
         'image_dir = "a\\u0000"\nkeep_tokens = 99999999999999999999\n',
         ["foo: no such key", "batchsize: no such key", "image_dir: holds", "keep_tokens: is beyond"]),
        ("", ["no directory is named"]),
        ("resolutions = [64]\nenable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2\nnum_ar_buckets = 1000000000\n[[directory]]\n"
         "path = 'pictures'\n", ["num_ar_buckets: must be at most 1000, got 1000000000"]),
    ],
)  # fmt: skip
def test_strange_files_of_data_sets(key: str, text: str, says: list[str]) -> None:
    Path("strange.toml").write_text(text)
    name = "dataset.toml" if key == "eval" else "strange.toml"
    sets = "[eval]\neval_datasets = [{name = 'e', config = 'strange.toml'}]\n" if key == "eval" else ""
    Path("run.toml").write_text(TOP.replace("dataset.toml", name) + MODEL + sets)
    with pytest.raises(ConfigFault) as caught:
        parse(["--config=run.toml"])
    said = [str(fault) for fault in caught.value.faults]
    assert len(said) == len(says) and all(any(line in each for each in said) for line in says), said
    assert "SECRET" not in str(said)
