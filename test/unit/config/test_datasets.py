"""kohya's data set TOML: what each key sets, from which table it comes, and what is said of a file with faults."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config.datasets.datasets import subsets_of
from difftrain.config.datasets.keys import DATASET, KOHYA, OWN, SUBSET
from difftrain.config.digest import differences, digest, identity
from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.toml import dump, load, value_text
from difftrain.contracts import ConfigFault

# key -> (a value, another): for [general] and the table below it
VALUES: dict[str, tuple[Any, Any]] = {
    "batch_size": (3, 5), "resolution": (64, [96, 64]), "enable_bucket": (True, False), "min_bucket_reso": (32, 64),
    "max_bucket_reso": (512, 768), "bucket_reso_steps": (32, 8), "bucket_no_upscale": (True, False),
    "validation_split": (0.25, 0.5), "color_aug": (True, False), "face_crop_aug_range": ([1.5, 3.0], [1.0, 2.0]),
    "flip_aug": (True, False), "num_repeats": (4, 2), "random_crop": (True, False),
    "resize_interpolation": ("area", "lanczos"), "custom_attributes": ({"a": 1}, {"b": ["x", {"y": True}]}),
    "shuffle_caption": (True, False), "keep_tokens": (2, 1), "keep_tokens_separator": ("|||", "---"),
    "secondary_separator": (";;;", ";"), "caption_separator": ("; ", "|"), "enable_wildcard": (True, False),
    "token_warmup_min": (3, 2), "token_warmup_step": (0.5, 7), "caption_prefix": ("a", "b"),
    "caption_suffix": ("c", "d"), "caption_dropout_every_n_epochs": (2, 3), "caption_dropout_rate": (0.1, 0.2),
    "caption_tag_dropout_rate": (0.3, 0.4), "caption_extension": (".txt", ".caption"), "class_tokens": ("x", "y"),
    "is_reg": (True, False), "alpha_mask": (True, False),
}  # fmt: skip
NOT_RESOLVED = {"validation_seed", "network_multiplier", "cache_info"}
PATHS = {"image_dir", "metadata_file", "conditioning_data_dir"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "masks"):
        (tmp_path / name).mkdir()
    (tmp_path / "m.json").write_text("{}")
    return tmp_path


def table(entries: dict[str, Any]) -> str:
    return "".join(f"{name} = {value_text(value)}\n" for name, value in entries.items())


def write(folder: Path, general: dict[str, Any], dataset: dict[str, Any], subset: dict[str, Any]) -> Path:
    """Write a file of one data set with one subset to train on, and another of regularisation pictures."""
    path = folder / "sets.toml"
    subset = {"image_dir": str(folder / "a")} | subset
    path.write_text(
        f"[general]\n{table(general)}[[datasets]]\n{table(dataset)}[[datasets.subsets]]\n{table(subset)}"
        f'[[datasets.subsets]]\nimage_dir = "{folder / "b"}"\n'
    )
    return path


def argv(folder: Path, *more: str) -> list[str]:
    return ["--init_from_config=tiny", f"--output_dir={folder / 'out'}", *more]


def resolved(path: Path, *flags: str) -> TrainConfig:
    return parse(argv(path.parent, f"--dataset_config={path}", *flags)).config


def got(cfg: TrainConfig, name: str) -> Any:
    """Return what a key has become in the first data set and its first subset."""
    dataset, key = cfg.data.datasets[0], KOHYA[name]
    subset = dataset.subsets[0]
    owner = {"dataset": dataset, "subset": subset, "captions": subset.captions}[key.to.partition(".")[0]]
    return getattr(owner, key.field)


def same(found: Any, value: Any) -> bool:
    square = isinstance(value, int) and isinstance(found, tuple)
    return found == ((value, value) if square else tuple(value) if isinstance(found, tuple) else value)


def test_every_key_is_tried() -> None:
    assert set(VALUES) == set(KOHYA) - NOT_RESOLVED - PATHS


@pytest.mark.flags("dataset_config")
@pytest.mark.parametrize("name", VALUES)
def test_the_innermost_table_counts(folder: Path, name: str) -> None:
    first, second = VALUES[name]
    size, tables = {} if name == "resolution" else {"resolution": 64}, KOHYA[name].tables
    common = size | {"max_bucket_reso": 1024, "min_bucket_reso": 32} if name not in ("min_bucket_reso",) else size
    common = {key: value for key, value in common.items() if key != name}
    if tables != OWN:
        assert same(got(resolved(write(folder, common | {name: first}, {}, {})), name), first)
        assert same(got(resolved(write(folder, common | {name: first}, {name: second}, {})), name), second)
        assert same(got(resolved(write(folder, common | {name: second}, {name: first}, {})), name), first)
    if tables != DATASET:
        above = {} if tables == OWN else {name: first}
        assert same(got(resolved(write(folder, common, above, {name: second})), name), second)
        assert same(got(resolved(write(folder, common, above, {name: first})), name), first)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--train_batch_size=3"], "batch_size", 3), (["--flip_aug"], "flip_aug", True),
        (["--dataset_repeats=5"], "num_repeats", 5), (["--shuffle_caption"], "shuffle_caption", True),
        (["--caption_extension=.tags"], "caption_extension", ".tags"), (["--enable_bucket"], "enable_bucket", True),
        (["--validation_split=0.3"], "validation_split", 0.3), (["--alpha_mask"], "alpha_mask", True),
        (["--caption_prefix=x"], "caption_prefix", "x"), (["--random_crop"], "random_crop", True),
    ],
)  # fmt: skip
def test_the_command_line_counts_where_no_table_says_anything(
    folder: Path, flags: list[str], name: str, value: Any
) -> None:
    assert got(resolved(write(folder, {}, {}, {}), "--resolution=64", "--min_bucket_reso=32", *flags), name) == value


def test_a_flag_that_the_file_overrides_throughout_is_named(folder: Path) -> None:
    path = write(folder, {"resolution": 64}, {"batch_size": 2}, {})
    notes = parse(argv(folder, f"--dataset_config={path}", "--resolution=128", "--train_batch_size=3", "--flip_aug"))
    said = [note for note in notes.notes if names(note, path)]
    assert [note.split(":")[0] for note in said] == ["--resolution", "--train_batch_size"]


def test_the_page_shows_a_file_that_works_and_names_every_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data_sets.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    for name in ("cats", "reg", "more"):
        (folder / "pictures" / name).mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    monkeypatch.chdir(folder)
    (folder / "page.toml").write_text(text)
    cfg = resolved(folder / "page.toml", "--bucket_reso_steps=64")
    assert cfg.batch_sizes == (4, 16) and [len(each.subsets) for each in cfg.data.datasets] == [2, 2]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `") or line.startswith("| those")]
    named = [{name.partition(" (")[0].strip() for name in row[2].split(",")} for row in rows]
    assert named == [{key.name for key in KOHYA.values() if key.tables == at} for at in (DATASET, SUBSET, OWN)]


def test_three_kinds_of_subsets(folder: Path) -> None:
    path = folder / "sets.toml"
    path.write_text(f"""
[general]
class_tokens = "thing"
[[datasets]]
resolution = 64
[[datasets.subsets]]
image_dir = "{folder / "a"}"
cache_info = true
[[datasets.subsets]]
metadata_file = "{folder / "m.json"}"
image_dir = "{folder / "b"}"
[[datasets.subsets]]
image_dir = "{folder / "b"}"
conditioning_data_dir = "{folder / "masks"}"
""")
    dreambooth, finetune, controlnet = resolved(path, "--masked_loss").data.datasets[0].subsets
    assert dreambooth.class_tokens == "thing" and dreambooth.flat and not dreambooth.conditioning_dir
    assert finetune.metadata_file == str(folder / "m.json") and finetune.class_tokens is None and not finetune.flat
    assert controlnet.conditioning_dir == str(folder / "masks") and controlnet.flat


def test_what_is_said_of_the_whole_run(folder: Path) -> None:
    path = folder / "sets.toml"
    path.write_text(f"""
[[datasets]]
resolution = 64
batch_size = 4
validation_split = 0.1
validation_seed = 7
network_multiplier = 1.0
subsets = [{{ image_dir = "{folder / "a"}" }}]
[[datasets]]
resolution = [128, 64]
batch_size = 2
subsets = [{{ image_dir = "{folder / "a"}" }}, {{ image_dir = "{folder / "a"}" }}, {{ image_dir = "{folder / "b"}", num_repeats = 0 }}]
""")
    parsed = parse(argv(folder, f"--dataset_config={path}"))
    cfg = parsed.config
    assert (cfg.batch_sizes, cfg.training.batch_size, cfg.data.resolution) == ((4, 2), 4, (128, 64))
    assert (cfg.validation.split, cfg.validation.seed) == (0.1, 7)
    assert [each.validation_split for each in cfg.data.datasets] == [0.1, 0.0]
    assert [len(each.subsets) for each in cfg.data.datasets] == [1, 1]
    assert any(is_about(note, "[[datasets]] 2", folder / "a", "twice") for note in parsed.notes)
    assert any(is_about(note, "[[datasets.subsets]] 3", "num_repeats", "0") for note in parsed.notes)


def test_a_run_keeps_what_was_resolved_and_config_takes_it_back(folder: Path) -> None:
    path = write(folder, {"resolution": 64}, {"batch_size": 2}, {"custom_attributes": {"who": "me", "n": [1, 2]}})
    cfg = resolved(path, "--shuffle_caption")
    kept = folder / "config.toml"
    kept.write_text(dump(cfg))
    path.write_text("gone = 1\n")
    assert load(kept) == cfg
    assert parse([f"--config={kept}"]).config == cfg
    assert load(kept).data.datasets[0].subsets[0].custom_attributes == {"who": "me", "n": [1, 2]}
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={kept}", "--flip_aug"])
    (fault,) = caught.value.faults
    assert is_about(fault, "--flip_aug", kept)


def test_faults_inside_a_kept_configuration_are_placed(folder: Path) -> None:
    cfg = resolved(write(folder, {"resolution": 64}, {}, {}))
    kept = folder / "config.toml"
    kept.write_text(dump(cfg).replace("is_reg = false", "is_regg = false", 1).replace("repeats = 1\n", "repeats = 0\n"))
    with pytest.raises(ConfigFault) as caught:
        load(kept)
    for facts in (("1 subsets 1 is_regg", "is_reg"), ("1 subsets 2 repeats", "0")):
        assert any(is_about(fault, "[data] datasets", *facts) for fault in caught.value.faults), caught.value


BAD = """
[generall]
x = 1
[general]
shuffel_caption = true
is_reg = true
train_batch_size = 2
prior_loss_weight = 0.5
caption_dropout_rate = 1.5
keep_tokens = "2"
[[datasets]]
resolution = "512"
batch_size = 0
network_multiplier = 0.5
validation_split = 1979-05-27
image_dir = "x"
[[datasets.subsets]]
image_dir = "/nowhere/pictures"
flip_aug = 1
resize_interpolation = "lanczoss"
[[datasets.subsets]]
num_repeats = 2
[[datasets.subsets]]
metadata_file = "/nowhere/m.json"
is_reg = true
batch_size = 3
[[datasets]]
enable_bucket = true
"""


@pytest.mark.flags("dataset_config")
def test_all_faults_of_a_file_at_once(folder: Path) -> None:
    path = folder / "bad.toml"
    path.write_text(BAD)
    with pytest.raises(ConfigFault) as caught:
        parse(argv(folder, f"--dataset_config={path}", "--train_data_dir=x", "--resolution=63"))
    said = {fault.where.removeprefix(f"{path} "): str(fault) for fault in caught.value.faults}
    one, subset = "[[datasets]] 1", "[[datasets]] 1 [[datasets.subsets]]"
    expected = {
        "generall": "general",
        "[general] shuffel_caption": "shuffle_caption",
        "[general] is_reg": "[[datasets.subsets]]",
        "[general] train_batch_size": "batch_size",
        "[general] prior_loss_weight": "--prior_loss_weight",
        "[general] caption_dropout_rate": "1 1.5",
        "[general] keep_tokens": "'2'",
        f"{one} resolution": "512 square [width, height]",
        f"{one} batch_size": "1 0",
        f"{one} network_multiplier": "0.5 adapters",
        f"{one} validation_split": "date",
        f"{one} image_dir": "[[datasets.subsets]]",
        f"{subset} 1 image_dir": "folder '/nowhere/pictures'",
        f"{subset} 1 flip_aug": "true false 1",
        f"{subset} 1 resize_interpolation": "lanczos",
        f"{subset} 2 image_dir": "missing",
        f"{subset} 3 metadata_file": "file '/nowhere/m.json'",
        f"{subset} 3 is_reg": "metadata_file",
        f"{subset} 3 batch_size": "[[datasets]]",
        "[[datasets]] 2": "subset",
    }
    assert {place: facts for place, facts in expected.items() if not is_about(said[place], place, *facts.split())} == {}
    assert set(said) == set(expected)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["[[datasets]]", "missing"]),
        ("datasets = 3", ["[[datasets]]", "list"]),
        ("[[datasets", ["sets.toml", "TOML"]),
        ("[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir='A'\nis_reg=true", ["[[datasets]] 1", "regularisation"]),
        ("[[datasets]]\n[[datasets.subsets]]\nimage_dir='A'", ["[[datasets]] 1", "resolution", "missing"]),
        ("[[datasets]]\nresolution=60\n[[datasets.subsets]]\nimage_dir='A'", ["sets.toml", "[[datasets]] 1 resolution", "32", "60,60"]),
        ("[[datasets]]\nresolution=64\n[[datasets.subsets]]\nimage_dir='A'\nmetadata_file='M'\nconditioning_data_dir='A'",
         ["[[datasets.subsets]] 1", "metadata_file", "conditioning_data_dir"]),
        ("[[datasets]]\nresolution=64\n[[datasets.subsets]]\nimage_dir='A'\nconditioning_data_dir='A'", ["--dataset_config", "conditioning_dir", "--masked_loss"]),
        ("[[datasets]]\nresolution=64\nvalidation_seed=1\n[[datasets.subsets]]\nimage_dir='A'\n"
         "[[datasets]]\nresolution=64\nvalidation_seed=2\n[[datasets.subsets]]\nimage_dir='A'", ["validation_seed", "differs"]),
        (None, ["--dataset_config", "file"]),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(folder: Path, text: str | None, facts: list[str]) -> None:
    path = folder / "sets.toml"
    if text is not None:
        path.write_text(text.replace("'A'", f"'{folder / 'a'}'").replace("'M'", f"'{folder / 'm.json'}'"))
    with pytest.raises(ConfigFault) as caught:
        parse(argv(folder, f"--dataset_config={path}"))
    assert len(caught.value.faults) == 1 and is_about(caught.value.faults[0], *facts)
    assert str(path) in str(caught.value.faults[0]) or caught.value.faults[0].where == "--dataset_config"


def test_a_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    path = write(folder, {}, {"resolution": 64}, {})
    plain = resolved(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert resolved(path) == plain


@pytest.mark.parametrize(
    ("flags", "where", "facts"),
    [
        (["--in_json=gone.json"], "--in_json", "file 'gone.json'"),
        (["--in_json=m.json", "--train_data_dir=b"], "--in_json", "--train_data_dir 2"),
        (["--reg_data_dir=gone"], "--reg_data_dir", "folder 'gone'"),
        (["--dataset_class=Pictures"], "--dataset_class", "package.module.Class 'Pictures'"),
        (["--dataset_class=a.B", "--in_json=m.json"], "--in_json", "contradicts --dataset_class"),
        (["--dataset_config=sets.toml", "--dataset_repeats=1,2"], "--dataset_repeats", "2 subset num_repeats"),
        (["--prior_loss_weight=-1"], "--prior_loss_weight", "0 -1"),
    ],
)  # fmt: skip
@pytest.mark.flags("in_json", "reg_data_dir", "dataset_class", "prior_loss_weight")
def test_ways_that_contradict_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], where: str, facts: str
) -> None:
    monkeypatch.chdir(folder)
    write(folder, {"resolution": 64}, {}, {})
    with pytest.raises(ConfigFault) as caught:
        parse(argv(folder, "--train_data_dir=a", "--resolution=64", *flags))
    assert any(is_about(fault, where, *facts.split()) for fault in caught.value.faults), caught.value


def test_a_weight_without_regularisation_pictures_is_named(folder: Path) -> None:
    line = argv(folder, f"--train_data_dir={folder / 'a'}", "--resolution=64", "--prior_loss_weight=0.5")
    assert any(is_about(note, "--prior_loss_weight", "--reg_data_dir") for note in parse(line).notes)
    assert parse([*line, f"--reg_data_dir={folder / 'b'}"]).notes == ()


def test_folders_of_flags_are_subsets_too(folder: Path) -> None:
    line = argv(folder, f"--train_data_dir={folder / 'a'}", "--resolution=64", "--flip_aug", "--dataset_repeats=3")
    trained, reg = subsets_of(parse([*line, f"--reg_data_dir={folder / 'b'}"]).config)
    assert (trained.image_dir, trained.repeats, trained.flip, trained.is_reg) == (str(folder / "a"), 3, True, False)
    assert (reg.image_dir, reg.repeats, reg.flip, reg.is_reg, reg.flat) == (str(folder / "b"), 1, True, True, False)


def test_what_makes_two_data_set_files_one_run(folder: Path) -> None:
    cfg = resolved(write(folder, {"resolution": 64}, {"batch_size": 4}, {"custom_attributes": {"a": 1}}))

    def changed(
        dataset: dict[str, Any] | None = None, subset: dict[str, Any] | None = None, **more: Any
    ) -> TrainConfig:
        old = cfg.data.datasets[0]
        first = old.subsets[0].model_copy(update=subset or {})
        new = old.model_copy(update={"subsets": (first, *old.subsets[1:])} | (dataset or {}))
        return cfg.model_copy(update={"data": cfg.data.model_copy(update={"datasets": (new,)} | more)})

    moved = changed(subset={"image_dir": "/elsewhere/a", "custom_attributes": {}}, dataset_config="other.toml")
    assert digest(moved) == digest(cfg)
    assert digest(changed(dataset={"batch_size": 2}), dp_size=2) == digest(cfg)
    for other, place in (
        (changed(subset={"repeats": 2}), "data set 1, subset 1: repeats"),
        (changed(subset={"image_dir": "/elsewhere/c"}), "data set 1, subset 1: image_dir"),
        (changed(dataset={"resolution": (96, 96)}), "data set 1: resolution"),
        (changed(dataset={"batch_size": 2}), "global batch"),
    ):
        assert digest(other) != digest(cfg)
        assert any(
            line.startswith(place) for line in differences(json.loads(json.dumps(identity(cfg))), identity(other))
        )


@pytest.mark.parametrize("general", [True, False])
def test_a_resolution_that_is_wrong_is_not_missing_too(folder: Path, general: bool) -> None:
    wrong: dict[str, Any] = {"resolution": "big"}
    path = write(folder, wrong if general else {}, {} if general else wrong, {})
    with pytest.raises(ConfigFault) as caught:
        parse(argv(folder, f"--dataset_config={path}"))
    assert [fault.where.split()[-1] for fault in caught.value.faults] == ["resolution"]


@pytest.mark.flags("dataset_config")
def test_a_file_of_datasets_may_be_json(folder: Path) -> None:
    toml = write(folder, {"resize_interpolation": "box"}, {"resolution": 64, "batch_size": 3}, {"num_repeats": 2})
    path = folder / "sets.json"
    path.write_text(json.dumps(tomllib.loads(toml.read_text())))
    assert resolved(path).data.datasets == resolved(toml).data.datasets
    assert resolved(toml).data.datasets[0].subsets[0].resize_interpolation == "box"
    for text in ("[1]", "{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigFault) as caught:
            resolved(path)
        assert all(is_about(fault, "--dataset_config") for fault in caught.value.faults)
