"""train.py's configuration takes nothing that it does not know, and names every fault by its place, all at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config.parse_flags import Parsed
from difftrain.config.parse_flags import parse as parse_flags
from difftrain.config.parse_keys import open_train_door, parse
from difftrain.contracts import ConfigFault
from difftrain.models.registry import LATER
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
    ("text", "argv", "flat", "facts"),
    [
        ("[monitoring]\nwandb_api_kye = 'SECRETSECRET'\n", (), "", ["[monitoring] wandb_api_kye", "key", "wandb_api_key"]),
        ("[monitoring]\nwandb_key = 'SECRETSECRET'\n", (), "", ["[monitoring] wandb_key", "key", "wandb_api_key"]),
        ("[save]\nhub_token = 'SECRETSECRET'\n", (), "", ["[save] hub_token", "key", "hf_token"]),
        ("[optimizer]\napi_key = 'SECRETSECRET'\n", (), "", ["[optimizer] api_key", "key"]),
        ("[optimizer]\nnote = 'hf_SECRETSECRETSECRET'\n", (), "", ["[optimizer] note", "key"]),
        ("", (), "my_password = 'SECRETSECRET'\n", ["my_password", "key"]),
        ("[whatever]\nx_token = 'SECRETSECRET'\n", (), "", ["[whatever]", "table"]),
        ("", ("--monitoring.other_token=SECRETSECRET",), "", ["--monitoring.other_token", "key"]),
        ("", ("--whatever.other_token", "SECRETSECRET"), "", ["--whatever.other_token", "table"]),
    ],
)  # fmt: skip
def test_an_unknown_key_is_no_secret(text: str, argv: tuple[str, ...], flat: str, facts: list[str]) -> None:
    before = dict(os.environ)
    (said,) = faults(text, *argv, flat=flat)
    assert is_about(said, *facts) and "SECRET" not in said and dict(os.environ) == before


# a key of one other table


@pytest.mark.parametrize(
    ("key", "home"),
    [("weight_decay", "[optimizer]"), ("betas", "[optimizer]"), ("prompts", "[sample]"), ("every_n_epochs", "")],
)
def test_a_key_that_one_other_table_has_is_named_with_it(key: str, home: str) -> None:
    (in_file,) = faults(f"[training]\n{key} = 1\n")
    (on_line,) = faults("", f"--training.{key}=1")
    assert names(in_file, f"[training] {key}") and names(on_line, f"--training.{key}")
    if home:
        assert all(home in each and "known are" not in each for each in (in_file, on_line))


# arguments of the optimizer's constructor


def test_arguments_of_the_optimizer_are_faults_of_their_place() -> None:
    text = "[optimizer]\ntype = 'adamw'\nbeta = [0.9, 0.99]\neps = 'small'\nmax_steps = 4\nlearning_rat = 1\nweight_decay = nan\n"
    said = faults(text, "--optimizer.amsgra=true", "--training.seed=x", "--optimizer.betas=1")
    expected = [
        ("[optimizer] beta", "adamw", "betas"),
        ("[optimizer] eps", "adamw's", "'small'"),
        ("[optimizer] max_steps", "adamw", "[optimizer]", "[training]"),
        ("[optimizer] learning_rat", "adamw", "learning_rate"),
        ("[optimizer] weight_decay", "adamw's", "nan"),
        ("--optimizer.amsgra", "adamw", "amsgrad"),
        ("--optimizer.betas", "adamw's", "2", "1"),
    ]
    assert not [facts for facts in expected if not any(is_about(each, *facts) for each in said)], said
    assert all("run.toml" in each for each in said if "[optimizer]" in each.partition(":")[0])
    assert len(said) == len(expected) + 1  # and the seed


def test_a_package_that_is_missing_is_the_only_fault_of_its_optimizer() -> None:
    (said,) = faults("[optimizer]\ntype = 'no_such_package_x.Adam'\nanything = 1\n")
    assert is_about(said, "[optimizer] type", "no_such_package_x.Adam", "package no_such_package_x")
    (said,) = faults("[optimizer]\nscheduler_type = 'no_such_package_x.Step'\nscheduler_args = ['a=1']\n")
    assert is_about(said, "[optimizer] scheduler_type", "no_such_package_x.Step", "package no_such_package_x")


def test_arguments_of_the_schedule_and_of_a_runs_own_record() -> None:
    said = faults(
        "[optimizer]\nscheduler_args = ['num_cycle=1']\nargs = ['beta=1']\n[training]\nlr_scheduler = 'cosine'\n"
    )
    assert is_about(said[0], "[optimizer] args", "AdamW", "beta", "betas") and "run.toml" in said[0]
    assert (
        is_about(said[1], "[optimizer] scheduler_args", "cosine", "num_cycle", "num_cycles") and "run.toml" in said[1]
    )


def test_half_life_needs_betas() -> None:
    (said,) = faults("[optimizer]\ntype = 'SGD'\nbeta2_half_life = 100\n")
    assert is_about(said, "[optimizer] beta2_half_life", "SGD", "betas")


# data sets


@pytest.mark.parametrize(
    ("own", "batch", "facts"),
    [
        ("", 8, ["kohya's", "batch_size", "8"]),
        ("batch_size = 3", 3, ["no effect", "batch_size"]),
    ],
)
def test_what_becomes_of_pairs_beside_kohyas_file(own: str, batch: int, facts: list[str]) -> None:
    Path("kohya.toml").write_text(
        f"[[datasets]]\nresolution = 64\n{own}\n[[datasets.subsets]]\nimage_dir = 'pictures'\n"
    )
    parsed = read("[training]\nmicro_batch_size_per_gpu = [[32, 8], [64, 4]]\n", "--dataset=kohya.toml")
    assert parsed.config.data.datasets[0].batch_size == batch
    (note,) = [note for note in parsed.notes if is_about(note, "kohya.toml")]
    assert names(note, "by resolution", *facts)


# what nobody writes in earnest


def at_the_door(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return what a door says of a command line that it refuses: a line for each fault, and no traceback."""
    assert open_train_door("train.py", list(argv), lambda parsed: 0) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert is_about(first, "train.py", len(rest))
    return rest


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"epochs = 3 # \xff", ["TOML", "0xff"]),
        ((TOP + MODEL).encode("utf-16"), ["TOML", "0xff"]),
        (b"epochs = 3\0", ["TOML", "line 1"]),
        (b"[training]\nmax_steps = 1\nmax_steps = 2\n", ["TOML", "line 3"]),
        (None, ["TOML", "directory"]),
    ],
)
def test_a_config_that_cannot_be_read(
    content: bytes | None, facts: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "x.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    (said,) = at_the_door(capsys, f"--config={path}")
    assert is_about(said, f"--config={path}", *facts)


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
        ("x.toml training", "[training]"),
        ("x.toml [model]", "tables", "[model]"),
        ("x.toml [save]", "tables", "[save]"),
        ("[optimizer] eps", "TOML", 2**63 - 1),
        ("[optimizer] note", repr("a\0b")),
        ("[optimizer] deeper", "AdamW"),
        ("[data] cache", "key"),
        ("eval_datasets", "1: name", "1"),
        ("eval_datasets", "2", "nam", "name"),
        ("nope.toml", "file"),
        ("--training.max_steps", "missing"),
        ("--seed", "--training.seed"),
        ("--dry_run", "no value", "1"),
        ("--.epochs", "option"),
        ("--training.seed", "0", "-1"),
        ("--save.output_name", repr("a\udcff")),
        ("--training.max_steps", "nan"),
        ("--metadata.title", repr("a\0")),
        ("--model.diffusers_path", "missing"),
    ]
    assert not [facts for facts in expected if not any(is_about(each, *facts) for each in said)], said
    assert len(said) == len(expected)


@pytest.mark.parametrize("word", ["--dataset=\udcff", "--dataset=a\0", "--resume_from_checkpoint=a\0"], ids=ascii)
def test_options_that_are_no_text(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(TOP + MODEL)
    (said,) = at_the_door(capsys, "--config=run.toml", word)
    option, _, value = word.partition("=")
    assert is_about(said, option, repr(value))


def test_a_batch_that_is_said_twice_is_one_fault() -> None:
    (said,) = faults("[training]\nmicro_batch_size_per_gpu = 3\n", flat="micro_batch_size_per_gpu = [[64, 2]]\n")
    assert is_about(
        said, "[training] micro_batch_size_per_gpu", "contradicts run.toml micro_batch_size_per_gpu", "3", "[[64, 2]]"
    )


def test_a_family_that_is_not_built_hides_no_other_fault() -> None:
    Path("run.toml").write_text(
        TOP + f"lr_scheduler = 'cosin'\n[model]\ntype = '{LATER[-1]}'\n[optimizer]\ntype = 'SGD'\nmomentun = 0.9\n"
    )
    with pytest.raises(ConfigFault) as caught:
        parse(["--config=run.toml"])
    expected = (("[model] type", repr(LATER[-1])), ("lr_scheduler", "cosine"), ("[optimizer] momentun", "momentum"))
    assert len(caught.value.faults) == 3
    for facts in expected:
        assert any(is_about(fault, *facts) for fault in caught.value.faults), (facts, caught.value)


@pytest.mark.parametrize("key", ["dataset", "eval"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('resolutions = [64]\n[[directory]]\npath = "a\\u0000b"\n', [("[[directory]] 1 path", repr("a\0b"))]),
        ("resolutions = [64]\nhf_token = 'SECRETSECRET'\n[[directory]]\npath = 'pictures'\nfoo = 1\n",
         [("hf_token", "key"), ("[[directory]] 1 foo", "key")]),
        ("[general]\nfoo = 1\n[[datasets]]\nresolution = 64\nbatchsize = 99999999999999999999\n[[datasets.subsets]]\n"
         'image_dir = "a\\u0000"\nkeep_tokens = 99999999999999999999\n',
         [("[general] foo", "key"), ("[[datasets]] 1 batchsize", "batch_size"), ("image_dir", repr("a\0")), ("keep_tokens", "TOML")]),
        ("", [("strange.toml", "[[directory]]")]),
        ("resolutions = [64]\nenable_ar_bucket = true\nmin_ar = 0.5\nmax_ar = 2\nnum_ar_buckets = 1000000000\n[[directory]]\n"
         "path = 'pictures'\n", [("num_ar_buckets", "1000", "1000000000")]),
    ],
)  # fmt: skip
def test_strange_files_of_data_sets(key: str, text: str, expected: list[tuple[str, ...]]) -> None:
    Path("strange.toml").write_text(text)
    name = "dataset.toml" if key == "eval" else "strange.toml"
    sets = "[eval]\neval_datasets = [{name = 'e', config = 'strange.toml'}]\n" if key == "eval" else ""
    Path("run.toml").write_text(TOP.replace("dataset.toml", name) + MODEL + sets)
    with pytest.raises(ConfigFault) as caught:
        parse(["--config=run.toml"])
    said = [str(fault) for fault in caught.value.faults]
    assert len(said) == len(expected), said
    assert not [facts for facts in expected if not any(is_about(each, *facts) for each in said)], said
    assert "SECRET" not in str(said)


# settings that nothing would read: each needs what it belongs to


@pytest.mark.parametrize(
    ("unread", "with_it"),
    [
        ("[loss]\nhuber_c = 0.3\n", "[loss]\nhuber_c = 0.3\ntype = 'huber'\n"),
        ("[loss]\nhuber_schedule = 'constant'\n", "[loss]\nhuber_schedule = 'constant'\ntype = 'smooth_l1'\n"),
        ("[sample]\nsampler = 'euler'\n", "[sample]\nsampler = 'euler'\nprompts = 'prompts.txt'\n"),
        ("[data]\ndataloader_prefetch_per_worker = 4\nnum_dataloader_workers = 0\n",
         "[data]\ndataloader_prefetch_per_worker = 4\nnum_dataloader_workers = 1\n"),
    ],
)  # fmt: skip
def test_what_nothing_would_read_is_a_fault(unread: str, with_it: str) -> None:
    Path("prompts.txt").write_text("a red star\n")
    (said,) = faults(unread)
    assert unread.splitlines()[1].split()[0] in said
    assert not read(with_it).notes or all("huber" not in note for note in read(with_it).notes)


def test_kohyas_command_lines_may_carry_it_along() -> None:
    line = ["--init_from_config=tiny", "--train_data_dir=pictures", "--output_dir=out", "--resolution=64"]
    notes = parse_flags([*line, "--huber_c=0.3", "--sample_sampler=euler"]).notes
    assert any("--huber_c" in note for note in notes) and any("--sample_sampler" in note for note in notes)
