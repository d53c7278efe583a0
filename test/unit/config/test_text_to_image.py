"""The door that takes the flags of diffusers' example: its table, what each flag sets, accelerate's variables, identities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config import accelerate_environment
from difftrain.config.parse_text_to_image import WeightsIdentity, parse
from difftrain.config.render.docs import text_to_image_page
from difftrain.config.render.help import text_to_image_help
from difftrain.config.schema.validate import fields
from difftrain.config.spellings.spelling import option, speaking
from difftrain.config.spellings.text_to_image import DIFFUSERS, FLAGS, OURS
from difftrain.contracts import ConfigFault
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.identify import identify, of_folder

ROOT = Path(__file__).parents[3]
# flag -> default of diffusers v0.26.3's parser; frozen: a name that leaves this list breaks somebody's script
THEIRS: dict[str, Any] = {
    "input_perturbation": 0, "pretrained_model_name_or_path": None, "revision": None, "variant": None, "dataset_name": None,
    "dataset_config_name": None, "train_data_dir": None, "image_column": "image", "caption_column": "text",
    "max_train_samples": None, "validation_prompts": None, "output_dir": "sd-model-finetuned", "cache_dir": None,
    "seed": None, "resolution": 512, "center_crop": False, "random_flip": False, "train_batch_size": 16,
    "num_train_epochs": 100, "max_train_steps": None, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
    "learning_rate": 1e-4, "scale_lr": False, "lr_scheduler": "constant", "lr_warmup_steps": 500, "snr_gamma": None,
    "use_8bit_adam": False, "allow_tf32": False, "use_ema": False, "non_ema_revision": None, "dataloader_num_workers": 0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_weight_decay": 1e-2, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
    "push_to_hub": False, "hub_token": None, "prediction_type": None, "hub_model_id": None, "logging_dir": "logs",
    "mixed_precision": None, "report_to": "tensorboard", "local_rank": -1, "checkpointing_steps": 500,
    "checkpoints_total_limit": None, "resume_from_checkpoint": None, "enable_xformers_memory_efficient_attention": False,
    "noise_offset": 0, "validation_epochs": 5, "tracker_project_name": "text2image-fine-tune",
}  # fmt: skip
FROZEN_OURS = {
    "config", "dry_run", "dry_run_ranks", "family", "init_from_config", "vae", "tokenizer1_path", "device", "engine", "shard", "shard_size", "threads",
    "performance", "log_every", "timed_step", "loss_target", "ddp_timeout", "webhook_url",
    "trace", "preempt_file",
}  # fmt: skip
Line = Callable[..., Any]
SD1 = WeightsIdentity("sd1", "epsilon")


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Parse flags after those of a smallest run; return the configuration, with what was said as `notes`."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "inner").mkdir(parents=True)

    def parsed(*flags: str, identity: WeightsIdentity = SD1) -> Any:
        base = [] if any(flag.startswith("--pretrained") for flag in flags) else ["--init_from_config=tiny"]
        base += [] if any(flag.startswith("--dataset_name") for flag in flags) else ["--train_data_dir=data"]
        return parse([*base, *flags], lambda text: identity)

    return parsed


def faults(line: Line, *flags: str, **more: Any) -> list[str]:
    """Return where the faults of a command line are."""
    with pytest.raises(ConfigFault) as caught:
        line(*flags, **more)
    return [fault.where for fault in caught.value.faults]


# ------------------------------------------------------------------ the table


def test_names_are_the_examples_and_frozen() -> None:
    assert [flag.name for flag in DIFFUSERS] == [name for name in FLAGS if name in THEIRS]
    assert {flag.name for flag in DIFFUSERS} == set(THEIRS) and {flag.name for flag in OURS} == FROZEN_OURS
    assert [flag.name for flag in DIFFUSERS if flag.status not in ("offered", "nearest")] == ["variant"]
    assert all((flag.kind == "switch") == (THEIRS[flag.name] is False) for flag in DIFFUSERS)


def test_every_flag_leads_to_a_field_or_says_what_it_does() -> None:
    known = set(fields())
    assert {flag.to for flag in FLAGS.values() if flag.to and not flag.to.startswith("?")} <= known
    with speaking("text_to_image"):
        text, page = text_to_image_help("PROG"), (ROOT / "docs" / "text_to_image.md").read_text(encoding="utf-8")
    assert all(flag.option in text and f"`{flag.option}" in page for flag in FLAGS.values())
    assert page == text_to_image_page(), "python -m difftrain.config.render.docs text_to_image > docs/text_to_image.md"


def test_nothing_given_is_what_the_example_takes(line: Line) -> None:
    cfg = line().config
    assert cfg.model.family == "sd1" and cfg.model.prediction_type == "epsilon" and not cfg.model.vae_fp32
    assert (cfg.data.dirs, cfg.data.split, cfg.data.resolution) == (("data",), None, (512, 512))
    assert cfg.data.random_crop and not cfg.data.flip and not cfg.data.enable_bucket and cfg.data.workers == 0
    assert (cfg.data.image_column, cfg.data.caption_column) == ("image", "text")
    assert cfg.data.resize_interpolation == "bilinear" and cfg.data.max_samples is None
    training = cfg.training
    assert (training.batch_size, training.accumulation, training.max_epochs, training.max_grad_norm) == (
        16,
        1,
        100,
        1.0,
    )
    assert (training.mixed_precision, training.seed, training.gradient_checkpointing) == ("no", None, False)
    optimizer = cfg.optimizer
    assert (optimizer.type, optimizer.learning_rate, optimizer.scheduler, optimizer.warmup_steps) == (
        "AdamW", 1e-4, "constant", 0,
    )  # fmt: skip
    assert optimizer.args == ("betas=(0.9, 0.999)", "eps=1e-08", "weight_decay=0.01")
    assert not cfg.ema.enable and not cfg.noise.offset and not cfg.noise.ip_gamma and cfg.loss.min_snr_gamma is None
    save = cfg.save
    assert (save.output_dir, save.naming, save.model_as) == ("sd-model-finetuned", "diffusers", "diffusers_safetensors")
    assert (save.checkpoint_every_n_steps, save.last_n_states, save.resume, save.every_n_steps) == (
        500,
        None,
        None,
        None,
    )
    assert (cfg.sample.every_n_epochs, cfg.sample.from_first_epoch, cfg.sample.texts) == (5, True, ())
    assert cfg.logging.tracker_name == "text2image-fine-tune" and cfg.hub.repo_id is None


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--input_perturbation=0.1", "noise.ip_gamma", 0.1),
        ("--image_column=img", "data.image_column", "img"),
        ("--caption_column=words", "data.caption_column", "words"),
        ("--max_train_samples=7", "data.max_samples", 7),
        ("--validation_prompts one two", "sample.texts", ("one", "two")),
        ("--output_dir=other", "save.output_dir", "other"),
        ("--cache_dir=kept", "data.cache_dir", "kept"),
        ("--seed=0", "training.seed", 0),
        ("--resolution=64", "data.resolution", (64, 64)),
        ("--center_crop", "data.random_crop", False),
        ("--random_flip", "data.flip", True),
        ("--train_batch_size=3", "training.batch_size", 3),
        ("--num_train_epochs=3", "training.max_epochs", 3),
        ("--max_train_steps=9", "training.max_steps", 9),
        ("--max_train_steps=9 --num_train_epochs=3", "training.max_epochs", None),
        ("--gradient_accumulation_steps=4", "training.accumulation", 4),
        ("--gradient_checkpointing", "training.gradient_checkpointing", True),
        ("--learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("--scale_lr --train_batch_size=2 --gradient_accumulation_steps=3", "optimizer.learning_rate", pytest.approx(6e-4)),
        ("--lr_scheduler=cosine", "optimizer.warmup_steps", 500),
        ("--lr_scheduler=linear --lr_warmup_steps=3", "optimizer.warmup_steps", 3),
        ("--lr_warmup_steps=3", "optimizer.warmup_steps", 0),
        ("--snr_gamma=5", "loss.min_snr_gamma", 5.0),
        ("--use_8bit_adam --adam_beta1=0.8", "optimizer.args", ("betas=(0.8, 0.999)", "eps=1e-08", "weight_decay=0.01")),
        ("--adam_beta2=0.9 --adam_weight_decay=0 --adam_epsilon=1e-6", "optimizer.args",
         ("betas=(0.9, 0.9)", "eps=1e-06", "weight_decay=0.0")),
        ("--allow_tf32", "training.allow_tf32", True),
        ("--use_ema", "ema.ramp", True),
        ("--dataloader_num_workers=2", "data.workers", 2),
        ("--max_grad_norm=0.5", "training.max_grad_norm", 0.5),
        ("--push_to_hub --output_dir=mine", "hub.repo_id", "mine"),
        ("--push_to_hub --hub_model_id=org/name", "hub.repo_id", "org/name"),
        ("--hub_model_id=org/name", "hub.repo_id", None),
        ("--prediction_type=v_prediction", "model.prediction_type", "v_prediction"),
        ("--output_dir=o --logging_dir=tb", "logging.logging_dir", "o/tb"),
        ("--mixed_precision=bf16", "training.mixed_precision", "bf16"),
        ("--checkpointing_steps=7", "save.checkpoint_every_n_steps", 7),
        ("--checkpoints_total_limit=3", "save.last_n_states", 3),
        ("--resume_from_checkpoint=latest", "save.resume", "auto"),
        ("--enable_xformers_memory_efficient_attention", "training.attention", "xformers"),
        ("--noise_offset=0.05", "noise.offset", 0.05),
        ("--validation_prompts=x --validation_epochs=2", "sample.every_n_epochs", 2),
        ("--tracker_project_name=p", "logging.tracker_name", "p"),
        ("--dataset_name=data", "data.split", "train"),
        ("--dataset_name=data --dataset_config_name=inner", "data.dirs", ("data/inner",)),
        ("--dataset_name=data --dataset_config_name=default", "data.dirs", ("data",)),
        ("--dataset_name=data --train_data_dir=inner", "data.dirs", ("data/inner",)),
        ("--dataset_name=org/set --dataset_config_name=a", "data.dirs", ("org/set/a",)),
        ("--pretrained_model_name_or_path=org/model --revision=fp16", "model.pretrained", "org/model@fp16"),
        ("--pretrained_model_name_or_path=org/model --revision=a --non_ema_revision=a", "model.pretrained", "org/model@a"),
        ("--timed_step=3", "logging.timed_step", 3),
        ("--loss_target=0.5", "logging.loss_target", 0.5),
    ],
)  # fmt: skip
def test_a_flag_sets_its_field(line: Line, monkeypatch: pytest.MonkeyPatch, flags: str, path: str, value: Any) -> None:
    monkeypatch.setattr("difftrain.config.rules.optimizer.is_installed", lambda name: True)
    section, _, field = path.partition(".")
    assert getattr(getattr(line(*flags.split()).config, section), field) == value


def test_the_rate_is_scaled_by_the_processes_too(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    cfg = line("--scale_lr", "--train_batch_size=2", "--learning_rate=1e-5").config
    assert cfg.optimizer.learning_rate == pytest.approx(16e-5)


def test_a_token_moves_to_the_environment(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("HF_TOKEN", "")
    parsed = line("--hub_token=secret-word")
    assert os.environ["HF_TOKEN"] == "secret-word" and "secret-word" not in str((parsed.config, parsed.argv))


def test_a_checkpoint_is_found_by_its_name_in_the_output_folder(line: Line, tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    for given in ("checkpoint-5", "elsewhere/checkpoint-5"):
        cfg = line("--output_dir=out", f"--resume_from_checkpoint={given}").config
        assert cfg.save.resume == "out/checkpoint-5"
    assert faults(line, "--output_dir=out", "--resume_from_checkpoint=checkpoint-6") == ["--resume_from_checkpoint"]
    with pytest.raises(ConfigFault) as caught:
        line("--output_dir=out", "--resume_from_checkpoint=checkpoint-6")
    (fault,) = caught.value.faults
    assert is_about(fault, "--resume_from_checkpoint", "checkpoint-6", "latest", "checkpoint-5")


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ("--variant=fp16", "--variant"),
        ("--report_to=comet_ml", "--report_to"),
        ("--report_to=mlflow", "--report_to"),
        ("--non_ema_revision=old", "--non_ema_revision"),
        ("--dataset_config_name=x", "--dataset_config_name"),
        ("--dataset_name=data --dataset_config_name=nowhere", "--dataset_config_name"),
        ("--adam_beta1=1.5", "--adam_beta1"),
        ("--adam_epsilon=-1", "--adam_epsilon"),
        ("--resolution=100", "--resolution"),
        ("--lr_scheduler=cosin", "--lr_scheduler"),
        ("--mixed_precision=fp8", "--mixed_precision"),
        ("--family=sd3", "--family"),
        ("--pretrained_model_name_or_path=/nowhere", "--pretrained_model_name_or_path"),
        ("--pretrained_model_name_or_path=org/model@a --revision=b", "--revision"),
        ("--trian_batch_size=1", "--trian_batch_size"),
        ("--local_rank=3", "--local_rank"),
    ],
)
def test_what_cannot_be_is_refused_by_name(line: Line, flags: str, where: str) -> None:
    assert where in faults(line, *flags.split())


def test_messages_are_spelt_as_this_door_does() -> None:
    with speaking("text_to_image"):
        assert option("training.max_epochs") == "--num_train_epochs" and option("data.dirs") == "--dataset_name"
        assert option("data.random_crop", False) == "--center_crop"
        assert option("flow.min_t") == "[flow] min_t"


# ------------------------------------------------------------------ accelerate's launcher


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "training.mixed_precision", "fp16"),
        ("ACCELERATE_USE_CPU", "True", "training.device", "cpu"),
        ("ACCELERATE_USE_CPU", "False", "training.device", "auto"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "training.compile_backend", "eager"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", "training.compile", False),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "training.accumulation", 4),
    ],
)
def test_accelerates_variables_are_taken(
    line: Line, monkeypatch: pytest.MonkeyPatch, name: str, text: str, path: str, value: Any
) -> None:
    monkeypatch.setenv(name, text)
    section, _, field = path.partition(".")
    assert getattr(getattr(line().config, section), field) == value


def test_a_flag_wins_over_accelerates_variable(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert line("--mixed_precision=no").config.training.mixed_precision == "no"


@pytest.mark.parametrize(
    "name",
    [
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_MEGATRON_LM",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
    ],
)
def test_what_accelerate_asks_for_in_vain_is_refused(line: Line, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "false")
    line()
    monkeypatch.setenv(name, "true")
    assert faults(line) == [name]


def test_ranks_of_mpi_are_refused(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    assert faults(line) == ["PMI_SIZE"]
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun's, inside an allocation of MPI
    line()


def test_every_variable_of_the_launcher_is_known() -> None:
    """Those that its command sets for a single or several processes without a plugin."""
    import re
    from importlib.metadata import files

    source = next(each for each in files("accelerate") or [] if str(each) == "accelerate/utils/launch.py").read_text()
    plain = source[
        source.index("def prepare_simple_launcher_cmd_env") : source.index("def prepare_sagemager_args_inputs")
    ]
    deepspeed = source[source.index("def prepare_deepspeed_cmd_env") : source.index("def prepare_tpu")]
    ours = Path(accelerate_environment.__file__).read_text()
    asked = set(re.findall(r"ACCELERATE_[A-Z_0-9]+", plain + deepspeed))
    of_plugins = {name for name in asked if "DEEPSPEED_" in name or "DS_FIELDS" in name or name.endswith("CLIPPING")}
    regional = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"}  # what is done anyway
    assert asked and not {name for name in asked - of_plugins - regional if name not in ours}


# ------------------------------------------------------------------ what weights are


def write_index(folder: Path, pipeline: str, unet: dict[str, Any], scheduler: dict[str, Any] | None = None) -> Path:
    (folder / "unet").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    (folder / "unet" / "config.json").write_text(json.dumps(unet))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler or {}))
    return folder


@pytest.mark.parametrize(
    ("pipeline", "unet", "scheduler", "family", "prediction"),
    [
        ("StableDiffusionPipeline", {}, {}, "sd1", "epsilon"),
        ("StableDiffusionPipeline", {"use_linear_projection": True}, {"prediction_type": "v_prediction"}, "sd2", "v_prediction"),
        ("StableDiffusionPipeline", {"use_linear_projection": True}, {"beta_start": 0.00085}, "sd2", "epsilon"),
        ("StableDiffusionXLPipeline", {}, {}, "sdxl", "epsilon"),
    ],
)  # fmt: skip
def test_a_folder_tells_its_family(
    tmp_path: Path, pipeline: str, unet: dict[str, Any], scheduler: dict[str, Any], family: str, prediction: str
) -> None:
    folder = write_index(tmp_path / "model", pipeline, unet, scheduler)
    assert identify(str(folder)) == WeightsIdentity(family, prediction)


@pytest.mark.parametrize(
    ("pipeline", "scheduler"),
    [("KandinskyPipeline", {}), ("StableDiffusionPipeline", {"beta_schedule": "linear"}),
     ("StableDiffusionPipeline", {"prediction_type": "sample"})],
)  # fmt: skip
def test_a_folder_that_cannot_be_trained_says_why(
    line: Line, tmp_path: Path, pipeline: str, scheduler: dict[str, Any]
) -> None:
    folder = write_index(tmp_path / "model", pipeline, {}, scheduler)
    identity = identify(str(folder))
    assert identity.faults
    flag = "--pretrained_model_name_or_path"
    assert flag in faults(line, f"{flag}={folder}", identity=identity)


def test_a_folder_without_an_index_and_a_file_of_nothing(tmp_path: Path) -> None:
    assert of_folder(lambda name: None).faults and identify(str(tmp_path)).faults
    (tmp_path / "x.safetensors").write_bytes(b"no header")
    assert identify(str(tmp_path / "x.safetensors")).faults
    assert identify(str(tmp_path / "x.ckpt")) == WeightsIdentity()  # read with torch alone: --family says it


@pytest.mark.parametrize(
    ("key", "family"),
    [("cond_stage_model.transformer.x", "sd1"), ("cond_stage_model.model.transformer.resblocks.0.x", "sd2")],
)
def test_one_file_tells_its_family_by_its_keys(tmp_path: Path, key: str, family: str) -> None:
    header = json.dumps({key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert identify(str(file)).family == family in FAMILIES


def test_a_file_that_does_not_tell_needs_the_family(line: Line, tmp_path: Path) -> None:
    (tmp_path / "m.ckpt").write_bytes(b"x")
    flag = f"--pretrained_model_name_or_path={tmp_path / 'm.ckpt'}"
    assert faults(line, flag, identity=WeightsIdentity()) == ["--pretrained_model_name_or_path"]
    assert (
        line(flag, "--family=sd2", "--prediction_type=epsilon", identity=WeightsIdentity()).config.model.family == "sd2"
    )
