"""What goes with which optimizer, said before torch is imported: rates, blocks, schedules, missing packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from refusals import is_about

from difftrain.config.parse_flags import Parsed, parse
from difftrain.config.schema import rates
from difftrain.config.schema.sections import OptimizerSection, TrainConfig
from difftrain.contracts import ConfigFault

BLOCKS = ",".join(["1e-5"] * 23)


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").touch()
    return [
        "--init_from_config=base",
        f"--train_data_dir={tmp_path / 'data'}",
        f"--output_dir={tmp_path / 'out'}",
        "--resolution=64,64",
    ]


def parsed(line: list[str], words: str) -> Parsed:
    return parse([*line, *words.split()])


def faults(line: list[str], words: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parsed(line, words)
    return [str(fault) for fault in caught.value.faults]


def notes(line: list[str], words: str) -> list[str]:
    return list(parsed(line, words).notes)


WRONG = [
    # blocks
    ("--block_lr=" + ",".join(["1e-5"] * 22), ["--block_lr", "22", "23"]),
    ("--block_lr=1,2,x", ["--block_lr", "'x'"]),
    ("--block_lr=-1" + ",1" * 22, ["--block_lr", "0", "-1"]),
    (f"--block_lr={BLOCKS} --unet_lr=1e-5", ["--unet_lr", "contradicts --block_lr"]),
    (f"--block_lr={BLOCKS} --learning_rate=0", ["--block_lr", "contradicts --learning_rate=0"]),
    # encoders
    ("--train_text_encoder --text_encoder_lr 1e-5 1e-6 1e-7", ["--text_encoder_lr", "3", "2"]),
    ("--train_text_encoder --text_encoder_lr=1e-5 --learning_rate_te2=0", ["--text_encoder_lr", "contradicts --learning_rate_te2"]),
    # which optimizer
    ("--use_8bit_adam --use_lion_optimizer", ["--use_lion_optimizer", "contradicts --use_8bit_adam"]),
    ("--use_8bit_adam --optimizer_type=Lion", ["--optimizer_type", "contradicts --use_8bit_adam"]),
    ("--optimizer_type=Prodgy", ["--optimizer_type", "'Prodgy'", "Prodigy"]),
    ("--optimizer_type=rmsprob", ["--optimizer_type", "'rmsprob'", "RMSprop"]),
    # one rate
    ("--optimizer_type=Prodigy --learning_rate=1 --unet_lr=0.5 --train_text_encoder",
     ["--optimizer_type", "Prodigy", "0.5, 1"]),
    (f"--optimizer_type=DAdaptAdam --learning_rate=1 --block_lr=0.5{',1' * 22}", ["--optimizer_type", "DAdaptAdam", "0.5, 1"]),
    # Adafactor and its schedule
    ("--lr_scheduler=adafactor", ["--lr_scheduler", "--optimizer_type=Adafactor", "relative_step"]),
    ("--optimizer_type=Adafactor --optimizer_args relative_step=False --lr_scheduler=adafactor", ["--lr_scheduler", "relative_step"]),
    ("--optimizer_type=Adafactor --lr_warmup_steps=5", ["--lr_warmup_steps", "warm-up"]),
    ("--optimizer_type=Adafactor --lr_scheduler_type=StepLR", ["--lr_scheduler_type", "Adafactor", "relative_step=False"]),
    ("--optimizer_type=Adafactor --lr_scheduler=adafactor:fast", ["--lr_scheduler", "adafactor:1e-3"]),
    ("--lr_scheduler=cosine:1", ["--lr_scheduler", "'cosine:1'"]),
    # Ascend's
    ("--optimizer_type=NpuFusedAdamW --mixed_precision=bf16 --full_bf16",
     ["--optimizer_type", "bf16", "--master_weights=fp32"]),
    ("--optimizer_type=apex.optimizers.NpuFusedAdamW", ["--optimizer_type", "apex.amp", "AdamW"]),
    # schedule-free
    ("--optimizer_type=AdamWScheduleFree --use_ema", ["--use_ema", "contradicts", "schedule-free"]),
    ("--optimizer_schedulefree_wrapper --use_ema", ["--use_ema", "contradicts", "schedule-free"]),
    ("--optimizer_schedulefree_wrapper --optimizer_type=oss", ["--optimizer_schedulefree_wrapper", "sharded"]),
    ("--schedulefree_wrapper_args momentum=0.9", ["--schedulefree_wrapper_args", "needs --optimizer_schedulefree_wrapper"]),
    ("--optimizer_schedulefree_wrapper --schedulefree_wrapper_args momentum", ["--schedulefree_wrapper_args", "key=value", "'momentum'"]),
]  # fmt: skip


@pytest.mark.flags("block_lr", "unet_lr", "text_encoder_lr", "use_8bit_adam", "use_lion_optimizer", "optimizer_type")
@pytest.mark.parametrize(("words", "facts"), WRONG, ids=[words[:70] for words, _ in WRONG])
def test_one_contradiction_is_one_fault(
    line: list[str], words: str, facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("difftrain.config.rules.optimizer.is_installed", lambda module: True)
    (found,) = faults(line, words)
    assert is_about(found, *facts)


SAID = [
    ("--optimizer_type=Prodigy --learning_rate=1e-4", ["--learning_rate", "Prodigy", "0.0001", "1.0"]),
    ("--optimizer_type=dadaptlion", ["--learning_rate", "dadaptlion", "2e-06", "1.0"]),
    ("--optimizer_type=DAdaptAdan --learning_rate=1 --unet_lr=0.5 --train_text_encoder",
     ["--optimizer_type", "DAdaptAdan", "first", "0.5, 1"]),
    ("--optimizer_type=Adafactor --learning_rate=1e-3", ["--learning_rate", "Adafactor", "relative_step=False", "first"]),
    ("--optimizer_type=Adafactor --unet_lr=1e-3", ["--unet_lr", "Adafactor", "relative_step=False", "frozen"]),
    ("--optimizer_type=Adafactor --lr_scheduler=cosine", ["--lr_scheduler", "Adafactor", "relative_step=False"]),
    ("--optimizer_type=Adafactor --max_grad_norm=0 --lr_scheduler=constant_with_warmup --lr_warmup_steps=3"
     " --optimizer_args relative_step=False clip_threshold=2.0", ["--optimizer_args", "clip_threshold=1.0"]),
    ("--optimizer_type=Adafactor --lr_scheduler=constant_with_warmup --lr_warmup_steps=3"
     " --optimizer_args relative_step=False", ["--max_grad_norm", "Adafactor"]),
    ("--optimizer_type=Adafactor --max_grad_norm=0 --optimizer_args relative_step=False",
     ["--lr_scheduler", "constant_with_warmup"]),
    ("--optimizer_type=Adafactor --optimizer_args relative_step=False warmup_init=True", ["--optimizer_args", "relative_step=True", "warmup_init=True"]),
    ("--optimizer_type=AdamWScheduleFree --lr_warmup_steps=5", ["--lr_warmup_steps", "warmup_steps=N"]),
    ("--optimizer_type=AdamWScheduleFree --lr_scheduler=cosine", ["--lr_scheduler", "schedule-free"]),
    ("--optimizer_type=SGDScheduleFree --optimizer_schedulefree_wrapper", ["--optimizer_schedulefree_wrapper", "SGDScheduleFree"]),
    ("--unet_lr=1e-5 --learning_rate=1e-4", ["--learning_rate", "part"]),
]  # fmt: skip


@pytest.mark.flags("learning_rate", "max_grad_norm", "lr_scheduler", "lr_warmup_steps", "optimizer_args")
@pytest.mark.parametrize(("words", "facts"), SAID, ids=[words[:70] for words, _ in SAID])
def test_what_kohya_lets_pass_is_said(line: list[str], words: str, facts: list[str]) -> None:
    (found,) = notes(line, words)
    assert is_about(found, *facts)


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer_type=Prodigy --learning_rate=1",
        "--optimizer_type=Prodigy --learning_rate=1 --train_text_encoder --learning_rate_te1=0",
        "--optimizer_type=Adafactor",
        "--optimizer_type=Adafactor --lr_scheduler=adafactor:1e-3",
        "--optimizer_schedulefree_wrapper --lr_scheduler=constant_with_warmup --lr_warmup_steps=5",
        "--unet_lr=1e-5 --learning_rate=1e-4 --train_text_encoder",
        "--optimizer_type=AdamWScheduleFree --optimizer_args warmup_steps=5",
    ],
)
def test_what_fits_is_not_talked_about(line: list[str], words: str) -> None:
    assert notes(line, words + (" --learning_rate_te2=0" if "te1=0" in words else "")) in ([], notes(line, ""))


def test_all_of_them_at_once(line: list[str]) -> None:
    words = "--optimizer_type=Prodigy --learning_rate=1 --text_encoder_lr=1 --block_lr=1,2 --optimizer_args d0"
    assert len(faults(line, words)) == 3  # a text encoder's rate is passed over


def test_a_missing_package_is_a_fault_among_the_others(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    found = faults(line, "--optimizer_type=prodigy --learning_rate=1 --ema_decay=0.9")
    assert len(found) == 2
    assert any(is_about(each, "--optimizer_type", "package prodigyopt", "pip install") for each in found)


@pytest.mark.flags("use_8bit_adam", "use_lion_optimizer")
def test_the_old_switches_name_an_optimizer(line: list[str]) -> None:
    assert parsed(line, "--use_8bit_adam").config.optimizer.type == "AdamW8bit"
    assert parsed(line, "--use_lion_optimizer --optimizer_type=").config.optimizer.type == "Lion"


def rates_of(**fields: object) -> dict[str, float]:
    te = fields.pop("te", False)
    cfg = TrainConfig(optimizer=OptimizerSection(**{"learning_rate": 1.0, **fields}))  # type: ignore[arg-type]
    return rates.part_rates(cfg.model_copy(update={"model": cfg.model.model_copy(update={"train_text_encoder": te})}))


@pytest.mark.flags("learning_rate", "learning_rate_te1", "learning_rate_te2", "unet_lr", "text_encoder_lr",
                   "train_text_encoder")  # fmt: skip
def test_rates_of_the_parts() -> None:
    assert rates_of() == {"unet": 1.0}
    assert rates_of(te=True) == {"unet": 1.0, "text_encoder_1": 1.0, "text_encoder_2": 1.0}
    assert rates_of(te=True, unet_lr=2.0) == {"unet": 2.0, "text_encoder_1": 1.0, "text_encoder_2": 1.0}
    assert rates_of(te=True, text_encoder_lr=(3.0,)) == {"unet": 1.0, "text_encoder_1": 3.0, "text_encoder_2": 3.0}
    assert rates_of(te=True, text_encoder_lr=(3.0, 0.0)) == {"unet": 1.0, "text_encoder_1": 3.0}
    assert rates_of(te=True, learning_rate_te1=0.0) == {"unet": 1.0, "text_encoder_2": 1.0}
    assert rates_of(te=True, learning_rate_te2=4.0) == {"unet": 1.0, "text_encoder_1": 1.0, "text_encoder_2": 4.0}
    assert rates_of(unet_lr=0.0) == rates_of(block_lr=(0.0,) * 23) == rates_of(learning_rate=0.0) == {}
    assert rates_of(block_lr=(0.0, 2.0)) == {"unet": 1.0}


@pytest.mark.parametrize("text", ["--block_lr=" + BLOCKS, "--block_lr " + BLOCKS.replace(",", " ")])
def test_rates_are_separated_by_commas_or_blanks(line: list[str], text: str) -> None:
    assert parsed(line, text).config.optimizer.block_lr == (1e-5,) * 23
