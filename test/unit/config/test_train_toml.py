"""The TOML of train.py: every key leads somewhere, files that people own are read as they stand, faults come at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config.layers import KeyValue, Layer, judged, read_file
from difftrain.config.parse_flags import Parsed
from difftrain.config.parse_flags import parse as by_flags
from difftrain.config.parse_keys import parse
from difftrain.config.render.keys import WRITTEN
from difftrain.config.schema.names import OPTIMIZERS_LATER
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import choices_of, default_of, fields
from difftrain.config.spellings.keys import KEYS, SWAPPED, TABLES, key_at, key_of
from difftrain.config.spellings.spelling import meaning
from difftrain.config.toml import dump, value_text
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.registry import LATER, make_family
from difftrain.testing.pictures import write_folder

DATA = Path(__file__).parents[1] / "files"
EXAMPLES = sorted(path.name for path in DATA.glob("train_example_[134f]*.toml"))
MODEL = '[model]\ntype = "sdxl"\ninit_from_config = "tiny"\n'
Write = Callable[..., Path]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with pictures, a data set's file and a model folder, as the examples name them."""
    monkeypatch.chdir(tmp_path)
    for folder in ("pictures", "clips"):
        write_folder(tmp_path / folder, [(64, 64)] * 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'pictures'\n")
    for name in EXAMPLES:
        shutil.copy(DATA / name, tmp_path)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Write:
    """Return a function that writes a sound file: flat keys, then whatever tables are given."""

    def make(text: str = "", *, model: str = MODEL, flat: str = "") -> Path:
        top = 'output_dir = "out"\ndataset = "dataset.toml"\n' + ("" if "epochs" in text + flat else "epochs = 2\n")
        path = here / "run.toml"
        path.write_text(top + flat + model + text)
        return path

    return make


def faults(*argv: str) -> list[Fault]:
    with pytest.raises(ConfigFault) as caught:
        parse(list(argv))
    return caught.value.faults


def config(path: Path, *argv: str) -> TrainConfig:
    return parse([f"--config={path}", *argv]).config


# the published examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_examples_parse_as_they_stand(here: Path, name: str) -> None:
    """What they have that is not built yet is the only fault of a file, and named as that."""
    layer = read_file(here / name)
    assert all(names(fault.what, "built") for fault in layer.faults), layer.faults


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_examples_run_but_for_what_is_not_built(here: Path, name: str) -> None:
    """With what a preset leaves out, all else of them is sound."""
    own = (here / name).read_text()
    whole = here / "whole.toml"
    lacking = 'output_dir = "out"\ndataset = "dataset.toml"\nepochs = 1\n' if "epochs" not in own else ""
    model = "" if "[model]" in own else MODEL
    whole.write_text(lacking + own.replace("[model]\ndtype", MODEL + "dtype") + model)
    try:
        assert parse([f"--config={whole}"]).config.training.max_epochs
    except ConfigFault as error:
        # blocks that wait on the host are for adapters, and one of these trains all weights
        assert all(names(fault.what, "built") or "swap" in fault.where for fault in error.faults), error
        named = " ".join(map(str, error.faults)).lower()
        assert "adamw8bitkahan" not in named
        assert "'flux'" not in named and ("pipeline" in named) == ("pipeline_stages = 2" in own)


def test_what_the_flat_file_means(here: Path) -> None:
    parsed = parse(["--config=train_example_flat.toml"])
    cfg = parsed.config
    assert cfg.model.family == "sd3" and cfg.model.train_type == "sd3_light_pretrain" and cfg.model.num_layers == 15
    assert cfg.training.batch_size == 4 and cfg.training.accumulation == 2 and cfg.training.first_limit
    assert cfg.optimizer.learning_rate == 1e-5 and cfg.optimizer.scheduler == "constant"
    assert cfg.optimizer.warmup_steps == 0  # force_constant_lr wins
    assert cfg.optimizer.args == ("betas=(0.9, 0.999)", "weight_decay=0.01", "eps=1e-08")
    assert cfg.loss.type == "pseudo_huber" and cfg.loss.pseudo_huber_c == 0.5 and cfg.loss.text_recon_gamma == 0.1
    assert cfg.training.gradient_checkpointing and cfg.training.cpu_offload_checkpointing
    assert cfg.training.mixed_precision == "bf16" and cfg.training.full_precision is None
    assert cfg.save.precision == "bf16" and cfg.save.checkpoint_every_n_minutes == 120 and cfg.save.resume is None
    assert cfg.cache.batch_size == cfg.model.vae_batch_size == 8 and cfg.cache.workers == 2
    assert cfg.cache.latents_to_disk and cfg.cache.text_to_disk
    assert cfg.data.tar_order == "sequential" and cfg.data.shard_size == 4096 and cfg.data.prefetch == 2
    assert cfg.captions.dropout_rate == 0.1 and cfg.logging.log_every == 1 and cfg.logging.x_axis_examples
    assert cfg.ema.enable and (cfg.ema.decay, cfg.ema.update_every) == (0.99, 100)
    assert cfg.eval.sets[0].name == "held_out" and cfg.eval.sets[0].datasets and cfg.eval.batch_size == 1
    assert cfg.save.run_dirs and cfg.save.naming == "steps" and cfg.logging.log_with == "tensorboard"
    assert any(names(note, "smaller", "steps_per_print", "logging_steps") for note in parsed.notes)


def test_a_file_of_clips_is_refused_by_a_family_of_images(here: Path, write: Write) -> None:
    shutil.copy(DATA / "train_example_2.toml", here)
    found = faults(f"--config={write('')}", "--dataset=train_example_2.toml", "--data.resolution=[64, 64]")
    assert found and all(names(fault.what, "images", "clips") and "train_example_2" in fault.where for fault in found)


# the table


def sample(path: str) -> Any:
    """Return some value that a field takes."""
    if choices := choices_of(path):
        return choices[0]
    candidates = (
        default_of(path),
        1,
        0.5,
        "x",
        ["x"],
        [0.05],
        [1],
        [64, 64],
        [[64, 64]],
        [1.0, 2.0],
        {"hidden_1": "fp32"},
    )
    return next(each for each in candidates if each not in (None, ()) and judged(path, each)[1] is None)


@pytest.mark.parametrize("path", sorted(set(fields()) - WRITTEN))
def test_every_field_that_a_user_may_set_has_a_canonical_key(path: str) -> None:
    key, value = key_of(path), sample(path)
    table, name = (key.home, key.name) if key else tuple(path.split("."))
    if key and key.words:
        value = next(word for word, mine in key.words.items() if mine == value)
    layer = Layer().take([KeyValue(table, name, list(value) if isinstance(value, tuple) else value, "here")])
    assert not layer.faults and path in layer.values, layer.faults


def test_every_key_leads_to_a_field_or_says_why_not() -> None:
    for key in KEYS:
        assert not key.to or key.to.startswith("?") or key.to in set(fields())
        assert meaning(key, "train") and (key.to or key.secret or key.status != "offered"), key.name
    places = [(table, key.name) for key in KEYS for table in key.tables]
    assert len(places) == len(set(places))


FLAT = """\
output_dir dataset epochs save_every_n_epochs save_every_n_steps save_every_n_examples max_steps micro_batch_size_per_gpu
image_micro_batch_size_per_gpu eval_micro_batch_size_per_gpu eval_image_micro_batch_size_per_gpu eval_gradient_accumulation_steps
gradient_accumulation_steps gradient_clipping pipeline_stages partition_method partition_split activation_checkpointing
reentrant_activation_checkpointing blocks_to_swap disable_block_swap_for_eval compile warmup_steps lr_scheduler force_constant_lr
pseudo_huber_c huber_delta smooth_l1_beta uncond_fraction video_clip_mode caching_batch_size caching_num_workers caching_device
map_num_proc num_dataloader_workers dataloader_prefetch_per_worker prefetch_batches_per_worker eval_datasets eval_every_n_epochs
eval_every_n_steps eval_every_n_examples eval_before_first_step checkpoint_every_n_minutes checkpoint_every_n_epochs save_dtype
steps_per_print logging_steps x_axis_examples resume_from_checkpoint sd3_streaming_dataset sd3_shard_size
sd3_manifest_timeout_sec train_type training_type
"""


@pytest.mark.parametrize("name", FLAT.split())
def test_every_flat_key_has_one_home_among_the_tables(name: str) -> None:
    key = key_at("", name)
    assert key is not None and key.home in TABLES
    assert key_at(key.home, name) is key
    if key.home in SWAPPED:
        assert key_at(SWAPPED[key.home], name) is key


@pytest.mark.parametrize("family", LATER)
def test_families_that_are_not_built_are_refused_by_name(write: Write, family: str) -> None:
    found = faults(f"--config={write('', model=f'[model]{chr(10)}type = {family!r}')}")
    (fault,) = found
    assert is_about(fault, "[model] type", f"'{family}'", "built")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS_LATER))
def test_optimizers_that_are_not_built_are_refused_by_name(write: Write, name: str) -> None:
    found = faults(f"--config={write(f'[optimizer]{chr(10)}type = {name.upper()!r}')}")
    (fault,) = found
    assert is_about(fault, "[optimizer] type", name.upper(), "built")


# what keys mean


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nwarmup_steps = 5", {"optimizer.scheduler": "constant_with_warmup", "optimizer.warmup_steps": 5}),
        ("[optimization]\nlr_scheduler = 'cosine'\nwarmup_steps = 5", {"optimizer.scheduler": "cosine"}),
        ("[optimizer]\ntype = 'ADAMW'\nbetas = [0.9, 0.99]", {"optimizer.args": ("betas=(0.9, 0.99)",)}),
        ("[optimizer]\ntype = 'adamw_optimi'\nlr = 1", {"optimizer.type": "AdamW", "optimizer.learning_rate": 1.0}),
        ("[optimizer]\ngradient_release = true", {"optimizer.fused_backward": True}),
        ("[optimizer]\ntype = 'adamw8bitkahan'\nstabilize = false", {"optimizer.args": ("stabilize=False",)}),
        ("[optimizer]\nbetas = [0.8, 0.9]\nbeta2_half_life = 1", {"optimizer.args": ("betas=(0.8, 0.5)",)}),
        ("[optimization]\nactivation_checkpointing = true", {"training.gradient_checkpointing": True}),
        ("[ema]\ndecay = 0.9", {"ema.enable": True, "ema.decay": 0.9, "ema.update_every": 100}),
        ("[ema]\nenable = true", {"ema.decay": 0.99, "ema.update_every": 100}),
        ("[ema]", {"ema.enable": True, "ema.decay": 0.99}),
        ("[ema]\nenable = false\ndecay = 0.9", {"ema.enable": False, "ema.decay": 0.9999}),
        ("[loss]\nhuber_delta = 0.3", {"loss.type": "huber_delta", "loss.bend": 0.3}),
        ("[loss]\nsmooth_l1_beta = 2", {"loss.type": "smooth_l1_beta", "loss.bend": 2.0}),
        ("[engine]\ntype = 'native'\nthreads = 1", {"training.engine": "native", "training.threads": 1}),
        ("[deepspeed]\nenable = true\nzero_stage = 1", {"training.engine": "accelerate", "deepspeed.zero_stage": 1}),
        ("[engine]\ntype = 'deepspeed'\n[deepspeed]\nenable = true", {"training.engine": "accelerate"}),
        ("[engine]\ntype = 'deepspeed'", {"training.engine": "native"}),
        ("[monitoring]\nsteps_per_print = 7", {"logging.log_every": 7}),
        ("[save]\nresume_from_checkpoint = 40", {"save.resume": "40"}),
        ("[save]\nresume_from_checkpoint = true", {"save.resume": "latest"}),
        ("[data]\nsd3_streaming_dataset = false", {"data.tar_order": "random"}),
        ("[cache]\ncaching_batch_size = 3", {"cache.batch_size": 3, "model.vae_batch_size": 3}),
        ("[training]\nmicro_batch_size_per_gpu = [[32, 8], [64, 3]]", {"training.batch_size": 3}),
        ("[eval]\nimage_eval_micro_batch_size_per_gpu = 5\neval_micro_batch_size_per_gpu = 2", {"eval.batch_size": 5}),
        ("[training]\nimage_micro_batch_size_per_gpu = 5\nmicro_batch_size_per_gpu = 2", {"training.batch_size": 5}),
    ],
)  # fmt: skip
def test_what_keys_mean(write: Write, text: str, expected: dict[str, Any]) -> None:
    cfg = config(write(text + "\n"))
    for path, value in expected.items():
        section, _, field = path.partition(".")
        assert getattr(getattr(cfg, section), field) == value, path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dtype = 'bfloat16'\nmaster_weights = false", ("bf16", "bf16", "none")),
        ("dtype = 'bfloat16'\nmaster_weights = true", ("bf16", None, None)),
        ("dtype = 'bfloat16'\nmaster_weights = 'kahan'", ("bf16", "bf16", "kahan")),
        ("dtype = 'float16'", ("fp16", None, None)),
        ("dtype = 'float32'", ("no", None, None)),
    ],
)
def test_precision(write: Write, text: str, expected: tuple[str, str | None, str | None]) -> None:
    masters = "\n[training]\n" + "".join(f"{line}\n" for line in text.splitlines() if "master" in line)
    dtype = "".join(f"{line}\n" for line in text.splitlines() if "dtype" in line)
    training = config(write(dtype + masters)).training
    assert (training.mixed_precision, training.full_precision, training.master_weights) == expected


def test_rates_of_text_encoders_train_them(write: Write) -> None:
    cfg = config(write("text_encoder_1_lr = 1e-6\ntext_encoder_2_lr = 0\nunet_lr = 2e-6\n"))
    assert (
        cfg.model.train_text_encoder
        and cfg.optimizer.learning_rate_te1 == 1e-6
        and cfg.optimizer.learning_rate_te2 == 0
    )
    cfg = config(write("text_encoder_1_lr = 0\ntext_encoder_2_lr = 0\n"))
    assert not cfg.model.train_text_encoder and cfg.optimizer.learning_rate_te1 is None


def test_dtypes_of_trained_weights_are_said_to_have_no_effect(write: Write) -> None:
    parsed = parse([f"--config={write('transformer_dtype = {}'.format(repr('float8')))}"])
    assert any("transformer_dtype" in note and "float8" in note for note in parsed.notes)
    assert parsed.config.model.fp8_frozen is None
    assert (
        config(write("transformer_dtype = 'float8_e5m2'\nunet_lr = 0\ntext_encoder_1_lr = 1e-6\n")).model.fp8_frozen
        == "unet"
    )


def test_a_dtype_of_weights_that_are_only_held_is_what_they_are_stored_in(write: Write) -> None:
    model = '[model]\ntype = "flux"\ninit_from_config = "tiny"\ntrain_only = ["attn"]\ntransformer_dtype = "float8"\n'
    assert config(write(model=model)).model.base_dtype == "fp8"
    assert config(write(model=f'{model}base_dtype = "nf4"\n')).model.base_dtype == "nf4"


@pytest.mark.parametrize(
    ("flat", "limits"),
    [
        ("epochs = 2", (2, 1600, False)),
        ("max_steps = 9", (None, 9, False)),
        ("epochs = 2\nmax_steps = 9", (2, 9, True)),
    ],
)
def test_epochs_and_steps(write: Write, flat: str, limits: tuple[int | None, int, bool]) -> None:
    path = write("", flat="")
    path.write_text(path.read_text().replace("epochs = 2", flat))
    training = config(path).training
    assert (training.max_epochs, training.max_steps, training.first_limit) == limits


def test_captions_that_are_drawn_are_cached_several_times(here: Path) -> None:
    path = here / "own.toml"
    tables = (
        "[data]\ndirs = ['pictures']\nresolution = [64, 64]\n[captions]\nshuffle = true\n[cache]\ntext_to_disk = true\n"
    )
    path.write_text(f"output_dir = 'out'\nepochs = 1\n{MODEL}{tables}")
    parsed = parse([f"--config={path}"])
    assert parsed.config.cache.shuffle_num == 10 and any("--cache.shuffle_num: 10" in note for note in parsed.notes)


def test_what_a_data_sets_file_decides_by_itself_is_said(write: Write) -> None:
    notes = parse([f"--config={write('[data]' + chr(10) + 'min_bucket_reso = 128' + chr(10))}"]).notes
    assert any(is_about(note, "--data.min_bucket_reso", "dataset.toml") for note in notes)


def test_a_length_is_needed(write: Write) -> None:
    path = write("")
    path.write_text(path.read_text().replace("epochs = 2", ""))
    assert any(is_about(fault, "--training.epochs", "missing") for fault in faults(f"--config={path}"))


@pytest.mark.flags("family")
@pytest.mark.parametrize("family", ["sdxl", "sd3"])
def test_the_other_door_trains_the_same_families(here: Path, family: str) -> None:
    line = ["--train_data_dir=pictures", "--resolution=64", "--output_dir=out", "--pretrained_model_name_or_path=model"]
    cfg = by_flags([*line, f"--family={family}"]).config
    assert type(make_family(cfg)).__name__.lower() == f"{family}family"
    assert parse([f"--config={_recorded(here, cfg)}"]).config.model == cfg.model


def _recorded(folder: Path, cfg: TrainConfig) -> Path:
    path = folder / "recorded.toml"
    path.write_text(dump(cfg))
    return path


# precedence


def test_default_family_file_and_command_line(write: Write) -> None:
    sd3 = '[model]\ntype = "sd3"\ndiffusers_path = "model"\n'
    assert config(write("")).optimizer.learning_rate == default_of("optimizer.learning_rate")
    assert config(write("", model=sd3)).optimizer.learning_rate == 1e-4
    path = write("[optimizer]\nlr = 3e-4\n[cache]\ntext_to_disk = false\n", model=sd3)
    cfg = config(path)
    assert cfg.optimizer.learning_rate == 3e-4 and cfg.cache.latents_to_disk and not cfg.cache.text_to_disk
    assert config(path, "--optimizer.lr=5e-4").optimizer.learning_rate == 5e-4
    assert config(path, "--optimizer.learning_rate", "5e-4").optimizer.learning_rate == 5e-4


def test_a_number_for_all_wins_over_a_table_below_it(write: Write) -> None:
    path = write("[training]\nmicro_batch_size_per_gpu = [[64, 3]]\n")
    assert config(path).data.datasets[0].batch_size == 3
    assert config(path, "--training.micro_batch_size_per_gpu=2").data.datasets[0].batch_size == 2


def test_values_of_the_command_line_are_toml_else_text(write: Write) -> None:
    path = write("")
    cfg = config(path, "--optimizer.betas=[0.9, 0.95]", "--save.output_name=2026-01-01", "--metadata.title", "3")
    assert cfg.optimizer.args == ("betas=(0.9, 0.95)",)
    assert cfg.save.output_name == "2026-01-01" and cfg.metadata.title == "3"
    assert config(path, "--save.output_dir=true").save.output_dir == "true"


def test_the_preset_of_a_door(write: Write) -> None:
    preset = {"model.family": "sd3", "model.train_type": "sd3_light_pretrain"}
    path = write("", model='[model]\ndiffusers_path = "model"\n')
    cfg = parse([f"--config={path}"], (), preset).config
    assert cfg.model.family == "sd3" and cfg.model.train_type == "sd3_light_pretrain" and cfg.cache.text_to_disk
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={write('')}"], (), preset)
    assert any(is_about(fault, "[model] type", "sdxl", "contradicts") for fault in caught.value.faults)


def test_a_runs_own_record_is_a_config(write: Write, here: Path) -> None:
    parsed = parse([f"--config={write('[ema]' + chr(10) + 'decay = 0.9' + chr(10), flat=EVAL)}"])
    record = here / "record.toml"
    record.write_text(dump(parsed.config))
    (here / "dataset.toml").unlink()  # all that it said is in the record
    again = parse([f"--config={record}"])
    assert again.config == parsed.config and not again.notes


EVAL = 'eval_datasets = [{name = "a", config = "dataset.toml"}]\n'


# faults


BAD = """
foo = 1
epochs = "3"
[model]
type = "sdxl"
init_from_config = "tiny"
diffusers_pth = "x"
dtype = "bf17"
[training]
warmup_steps = 10
epoch = 4
[optimization]
warmup_steps = 11
pipeline_stages = 2
[save]
save_every_n_steps = 0
[eval]
eval_datasets = [{name = "a", config = "b.toml", x = 1}]
[trainning]
x = 1
[adapter]
type = "lorra"
"""


def test_all_faults_at_once_with_file_table_and_nearest_key(here: Path) -> None:
    path = here / "bad.toml"
    path.write_text(BAD)
    said = {
        fault.where.removeprefix(str(path)).strip(): f"{fault.what} ({fault.remedy})"
        for fault in faults(f"--config={path}", "--seed=1", "stray")
    }
    expected = {
        "foo": ["key"], "epochs": ["whole number", "'3'"], "[model] diffusers_pth": ["diffusers_path"],
        "[model] dtype": ["'bf17'", "bf16"], "[training] epoch": ["epochs"],
        "[optimization] warmup_steps": [f"contradicts {path} [training] warmup_steps"], "[save] save_every_n_steps": ["1", "0"],
        "[eval] eval_datasets": ["key", "x"], "[trainning]": ["training"], "[adapter] type": ["'lorra'", "lora"],
        "--output.output_dir": ["missing"], "--dataset": ["missing"],
        "--seed": ["--training.seed"], "'stray'": ["option"], "b.toml": ["file"],
    }  # fmt: skip
    assert set(said) == set(expected)
    for where, facts in expected.items():
        assert names(said[where], *facts), where


@pytest.mark.parametrize(
    ("flat", "text", "there"),
    [
        ("warmup_steps = 3\n", "[training]\nwarmup_steps = 4\n", "warmup_steps"),
        ("", "[training]\nmicro_batch_size_per_gpu = 3\nbatch_size = 4\n", "[training] micro_batch_size_per_gpu"),
        ("gradient_clipping = 1\n", "[training]\nmax_grad_norm = 2.0\n", "gradient_clipping"),
        ("train_type = 'normal_training'\ntraining_type = 'sd3_light_pretrain'\n", "", "train_type"),
        ("", "[optimizer]\nlr = 1e-4\nlearning_rate = 1e-5\n", "[optimizer] lr"),
        ("pseudo_huber_c = 0.5\nhuber_delta = 0.5\n", "", "pseudo_huber_c"),
    ],
)
def test_contradicting_spellings_name_both_places(write: Write, flat: str, text: str, there: str) -> None:
    path = write(text, flat=flat)
    found = [fault for fault in faults(f"--config={path}") if "contradicts" in fault.what]
    assert len(found) == 1 and f"contradicts {path} {there}" in found[0].what and str(path) in found[0].where


def test_two_places_may_say_the_same(write: Write) -> None:
    path = write("[training]\nwarmup_steps = 4\n[optimization]\nwarmup_steps = 4\n", flat="warmup_steps = 4\n")
    assert config(path).optimizer.warmup_steps == 4


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[training]\ngradient_clipping = '1'", ["number", "'1'"]),
        ("[training]\nmicro_batch_size_per_gpu = 1.5", ["whole number", "1.5"]),
        ("[training]\nmicro_batch_size_per_gpu = [[64]]", ["[[resolution, batch], ...]", "[[64]]"]),
        ("[optimization]\nactivation_checkpointing = 'yes'", ["'unsloth'", "'yes'"]),
        ("[optimization]\nactivation_checkpointing = 1", ["'unsloth'", "1"]),
        ("[data]\nvideo_clip_mode = 'single_end'", ["single_end", "multiple_overlapping"]),
        ("[training]\nseed = 1979-05-27", ["date"]),
        ("[eval]\neval_datasets = ['x']", ["tables"]),
        ("[monitoring]\nsteps_per_print = 0", ["1", "0"]),
        ("[monitoring]\nenable_wandb = 1", ["true", "false", "1"]),
        ("[training]\nforce_constant_lr = true", ["number", "True"]),
        ("[engine]\ntype = 'pipeline'", ["pipeline", "built"]),
        ("[engine]\ntype = 'nativ'", ["native"]),
        ("[output]\ndataset = 'nowhere.toml'", ["contradicts", "dataset.toml"]),
        ("[optimizer]\ntype = 'AdamWW'", ["AdamW"]),
        ("[save]\nlr = 1", ["[save]", "[optimizer]"]),
    ],
)
def test_what_is_wrong_is_said(write: Write, text: str, facts: list[str]) -> None:
    where = text.partition(" =")[0].replace("\n", " ")  # "[table] key"
    found = faults(f"--config={write(text + chr(10))}")
    assert any(is_about(fault, where, *facts) for fault in found), found


@pytest.mark.parametrize("content", [b"[training", b"\xff\xfe", None], ids=["torn", "not utf-8", "missing"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    assert any(str(path) in str(fault) for fault in faults(f"--config={path}"))


def test_messages_speak_of_train_pys_own_keys(write: Write) -> None:
    found = faults(f"--config={write('[ema]' + chr(10) + 'snapshot_precision = ' + repr('float') + chr(10))}")
    assert any(is_about(fault, "[ema] snapshot_precision", "--ema.profiles") for fault in found)
    found = faults(f"--config={write(chr(10), model='[model]' + chr(10))}")
    assert [fault.where for fault in found] == ["--model.diffusers_path"]
    assert "--pretrained" not in str(found[0]) and "--model.init_from_config" in str(found[0])


def test_three_processes_for_two_stages(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("[optimization]\npipeline_stages = 2\n")
    monkeypatch.setenv("WORLD_SIZE", "3")
    (fault,) = faults(f"--config={path}")
    assert is_about(fault, "[optimization] pipeline_stages", "2 stages", "3 processes", "1, 3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse([f"--config={path}"]).config.training.pipeline_stages == 2


# paths


def test_paths_are_looked_for_here_and_beside_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, elsewhere = here / "recipes", here / "elsewhere"
    beside.mkdir()
    elsewhere.mkdir()
    shutil.move(here / "dataset.toml", beside / "data.toml")
    shutil.move(here / "pictures", beside / "pictures")
    path = beside / "run.toml"
    path.write_text(f'output_dir = "out"\ndataset = "data.toml"\nepochs = 1\n{MODEL}')
    monkeypatch.chdir(elsewhere)
    cfg = config(path)
    assert Path(str(cfg.data.dataset_config)).samefile(beside / "data.toml")
    assert Path(str(cfg.data.datasets[0].subsets[0].image_dir)).samefile(beside / "pictures")
    assert cfg.save.output_dir == "out"  # nowhere yet: below the working directory
    shutil.copytree(beside / "pictures", elsewhere / "pictures")
    (elsewhere / "data.toml").write_text("resolutions = [32]\n[[directory]]\npath = 'pictures'\n")
    found = faults(f"--config={path}")
    assert str(path) in found[0].where and names(found[0].what, elsewhere, beside)
    (elsewhere / "data.toml").unlink()
    (elsewhere / "data.toml").symlink_to(beside / "data.toml")
    shutil.rmtree(elsewhere / "pictures")
    (elsewhere / "pictures").symlink_to(beside / "pictures")
    assert config(path)  # one file by two ways


def test_paths_of_the_command_line_are_of_the_working_directory(here: Path, write: Write, tmp_path: Path) -> None:
    (here / "recipes").mkdir()
    shutil.move(write(""), here / "recipes" / "run.toml")
    (here / "recipes" / "other.toml").write_text("")
    found = faults("--config=recipes/run.toml", "--dataset=other.toml")
    assert any(is_about(fault, "other.toml", "file") for fault in found), found


def test_a_batch_by_resolution_is_that_of_the_run_s_own_folders_too(here: Path) -> None:
    data = "[data]\ndirs = ['pictures']\nresolution = [64, 64]\n"
    top = 'output_dir = "out"\nepochs = 1\nmicro_batch_size_per_gpu = [[32, 8], [64, 3]]\n'
    (here / "own.toml").write_text(top + MODEL + data)
    assert config(here / "own.toml").batch_sizes == (3,)


# secrets


def test_secrets_move_to_the_environment_and_are_redacted(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "")
    text = '[monitoring]\nwandb_api_key = "0123456789abcdef"\n'
    argv = [
        f"--config={write(text, flat=SECRET)}",
        "--model.huggingface_token",
        "ghijklmnop",
    ]
    parsed: Parsed = parse(argv)
    assert os.environ["WANDB_API_KEY"] == "0123456789abcdef"
    assert os.environ["HF_TOKEN"] == "ghijklmnop"
    kept = [value_text(parsed.argv), dump(parsed.config), *parsed.notes]
    for secret in ("0123456789abcdef", "ghijklmnop", "hf_of_the_file_00000"):
        assert not any(secret in text for text in kept)
    variables = ("WANDB_API_KEY", "HF_TOKEN", "HF_TOKEN")
    assert [sum(names(note, variable) for variable in set(variables)) for note in parsed.notes] == [1] * len(variables)


def test_what_is_said_of_a_command_line_holds_no_secret(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    twice = ["--monitoring.wandb_api_key=0123456789abcdef", "--monitoring.wandb_api_key", "fedcba9876543210"]
    parsed = parse([f"--config={write('')}", *twice])
    assert os.environ["WANDB_API_KEY"] == "fedcba9876543210"
    assert any(names(note, "--monitoring.wandb_api_key", "twice") for note in parsed.notes)
    assert not any("fedcba" in note or "012345" in note for note in parsed.notes)
    found = faults("--wandb_api_key", "aaaabbbbccccdddd")
    assert any(is_about(fault, "--wandb_api_key") for fault in found) and not names(found, "aaaabbbbccccdddd")
    assert any(names(fault.what, "option") and "--wandb_api_key" not in fault.where for fault in found), found


SECRET = 'huggingface_token = "hf_of_the_file_00000"\n'


def test_an_empty_secret_is_none(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not parse([f"--config={write('[monitoring]' + chr(10) + 'wandb_api_key = ' + repr('') + chr(10))}"]).notes
    assert "WANDB_API_KEY" not in os.environ
