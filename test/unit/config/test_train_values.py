"""Values of train.py's keys: what each may look like, and what becomes of them where a data set's file is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config.layers import KeyValue, Layer, judged
from difftrain.config.parse_keys import literal, parse
from difftrain.config.render.docs import keys_page
from difftrain.config.render.keys import KeyLine, every_table, lines
from difftrain.config.render.schema import schema_of_files
from difftrain.contracts import ConfigFault, DataFault
from difftrain.data.prepare import prepare
from difftrain.testing.pictures import write_folder

RUN = """output_dir = "out"
dataset = "dataset.toml"
epochs = 2
[model]
type = "sdxl"
init_from_config = "tiny"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's file beside its data."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "pictures", [(64, 64)] * 2)
    (tmp_path / "dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


LINES = [line for table in every_table() for line in lines(table)]
# what stands in the column of values -> values of that kind; a number need not be within a field's bounds
KINDS: dict[str, tuple[str, ...]] = {
    "N": ("1", "8", "64"),
    "X": ("0.5", "0.1", "1", "2"),
    "TEXT": ("a", "latest", "https://host/path"),
    "{...}": ("{}",),
}


def examples(form: str) -> list[str]:
    """Return values as the column writes them: one of these must fit."""
    if form in KINDS:
        return list(KINDS[form])
    if form.startswith("["):
        inner = form[1:-1].removesuffix(", ...")
        parts = [inner] if inner.startswith("[") else inner.split(", ")
        if parts == ["TEXT"]:
            return ["['a']"]
        return [f"[{', '.join(each)}]" for each in zip(*map(examples, parts))]
    if form.startswith("{name = "):
        inner = form[len("{name = ") : -1]
        return [f"{{moments = {value if inner in 'NX' else repr(value)}}}" for value in examples(inner)]
    return [form]


@pytest.mark.parametrize(
    "line", [line for line in LINES if line.values != "..."], ids=lambda line: f"{line.table}.{line.name}"
)
def test_every_example_of_the_column_of_values_is_taken(line: KeyLine) -> None:
    for form in line.values.split("|"):
        found = []
        for text in examples(form):
            item = KeyValue(line.table, line.name, literal(text) if form[0] != "T" else text, "here", text=text)
            found.append(Layer().take([item]).faults)
        assert not all(found), (form, found)


def test_a_value_of_another_type_is_told_what_would_be_right() -> None:
    for path, value, *facts in (
        ("data.face_crop_range", 2.0, "list", "[X, X]", "2"),
        ("data.face_crop_range", [2.0], "list", "[X, X]", "[2.0]"),
        ("data.resolution", "128", "list", "[N, N]", "'128'"),
        ("data.resolution", [64, "a"], "whole number", "'a'"),
        ("data.flip", 1, "true", "false", "1"),
        ("cache.dtypes", "bf16", "table", "{name = TEXT}", "'bf16'"),
        ("save.run_dirs", "yes", "true", "false", "'yes'"),
        ("optimizer.learning_rate", [1], "number", "[1]"),
    ):
        wrong = judged(path, value)[1]
        assert wrong is not None and names(wrong[0], *facts), (path, wrong)


def test_one_number_is_a_square_or_holds_for_all(run: Path) -> None:
    cfg = parse([f"--config={run}", "--data.resolution=128", "--data.repeats=2"]).config
    assert cfg.data.repeats == (2,)
    told = schema_of_files()["properties"]["data"]["properties"]
    assert {"type": "integer"} in told["resolution"]["anyOf"] and {"type": "integer"} in told["repeats"]["anyOf"]
    (run.parent / "dataset.toml").write_text("[[directory]]\npath = 'pictures'\n")
    assert parse([f"--config={run}", "--data.resolution=128"]).config.data.datasets[0].resolution == (128, 128)


def test_a_data_set_is_written_out_by_itself(run: Path) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={run}", "--dump_dataset=there", "--cache_only", "--test_sample"])
    for option in ("--cache_only", "--test_sample"):
        assert any(is_about(fault, option, "contradicts --dump_dataset") for fault in caught.value.faults), option


def test_a_share_that_leaves_nothing_is_named_with_its_file(run: Path) -> None:
    (run.parent / "dataset.toml").write_text(
        "resolutions = [64]\nsubsample_ratio = 0.0001\n[[directory]]\npath = 'pictures'\n"
    )
    cfg = parse([f"--config={run}", "--data.cache_dir=cache"]).config
    with pytest.raises(DataFault) as caught:
        prepare(cfg, log=lambda line: None)
    assert is_about(caught.value, "dataset.toml", "subsample_ratio = 0.0001", "2")


def test_the_page_speaks_of_no_values_of_python_and_says_what_keys_mean() -> None:
    assert "None" not in keys_page()
    assert not [
        line for line in LINES if line.help in ("", line.name) or line.help.startswith(f"--{line.table}.{line.name}")
    ]


def test_what_the_run_says_of_pictures_holds_for_a_data_sets_file(run: Path) -> None:
    """Of an evaluation set nothing is drawn at random."""
    held = "[data]\nflip = true\nrandom_crop = true\nalpha_mask = true\n[eval]\nsets = [{name = 'a', config = 'dataset.toml'}]\n"
    run.write_text(RUN + held)
    parsed = parse([f"--config={run}", "--data.resolution=[128, 128]"])
    (subset,) = parsed.config.data.datasets[0].subsets
    (looked_at,) = parsed.config.eval.sets[0].datasets[0].subsets
    assert subset.flip and subset.random_crop and subset.alpha_mask and looked_at.alpha_mask
    assert not looked_at.flip and not looked_at.random_crop
    assert any(is_about(note, "--data.resolution", "dataset.toml") for note in parsed.notes)


def test_the_fsdp_engine_is_chosen_in_either_spelling(run: Path) -> None:
    flat = 'engine = "fsdp"\nshard = "hybrid"\nshard_size = 2\nfsdp_reshard_after_forward = "never"\n'
    run.write_text(flat + RUN)
    first = parse(["--config", str(run)]).config
    run.write_text(
        RUN + '[engine]\ntype = "fsdp"\nshard = "hybrid"\nshard_size = 2\nfsdp_reshard_after_forward = "never"\n'
    )
    second = parse(["--config", str(run)]).config
    for cfg in (first, second):
        assert cfg.training.engine == "fsdp"
        assert (cfg.fsdp.shard, cfg.fsdp.shard_size, cfg.fsdp.reshard_after_forward) == ("hybrid", 2, "never")
    run.write_text(RUN)
    line = parse(["--config", str(run), "--engine=fsdp", "--shard_size=2"]).config
    assert line.training.engine == "fsdp" and line.fsdp.shard_size == 2
