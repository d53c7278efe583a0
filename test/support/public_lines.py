"""Command lines and dataset files of the kinds that people publish for kohya's sdxl_train.py, rebuilt from their flags.

Each says what kohya's formulas give for its data: images and uses of a bucket, updates, rates by group, saves. Sets are such that
whole batches and kohya's last smaller one give the same number of updates, so that both kinds of epoch must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_RATE = 2e-6


@dataclass(frozen=True)
class PublicLine:
    """One line. folders: <repeats>_<class> -> images. updates, uses: kohya's. rates: by group. saves: names of exports.

    sets: a dataset TOML, in which HERE is the folder of the data; args: kohya's --config_file.
    """

    name: str
    flags: str
    folders: dict[str, int]
    updates: int
    uses: int
    rates: tuple[tuple[str, float], ...] = (("unet", DEFAULT_RATE),)
    sets: str = ""
    args: str = ""
    saves: tuple[str, ...] = ("last",)


def updates_of(uses: int, batch: int, accumulation: int, epochs: int) -> int:
    """Return kohya's number of updates of one bucket: ceil(ceil(uses / batch) / accumulation) an epoch."""
    batches = -(-uses // batch)
    return epochs * -(-batches // accumulation)


def _line(name: str, flags: str, folders: dict[str, int], **more: Any) -> PublicLine:
    """Make a line whose updates follow from kohya's formula, or from --max_train_steps."""
    words = dict(word.removeprefix("--").partition("=")[::2] for word in flags.split())
    number = {key: int(words.get(key, default)) for key, default in (
        ("train_batch_size", 1), ("gradient_accumulation_steps", 1), ("max_train_epochs", 0), ("max_train_steps", 1600))}  # fmt: skip
    uses = more.pop(
        "uses", sum(int(folder.partition("_")[0]) * images for folder, images in folders.items() if folder[0].isdigit())
    )
    steps = number["max_train_steps"]
    if epochs := more.pop("epochs", number["max_train_epochs"]):
        batch = more.pop("batch", number["train_batch_size"])
        steps = updates_of(uses, batch, number["gradient_accumulation_steps"], epochs)
    return PublicLine(name, flags, folders, more.pop("updates", steps), uses, **more)


DOG, DOG_CAT = {"10_sks dog": 4}, {"2_sks dog": 4, "4_cat": 2}
_TWO = (("unet", 4e-7), ("text_encoder_1", 4e-7), ("text_encoder_2", 4e-7))
_SETS = """
[general]
shuffle_caption = true
keep_tokens = 1
caption_extension = ".txt"
[[datasets]]
resolution = 64
batch_size = 4
[[datasets.subsets]]
image_dir = "HERE/2_sks dog"
num_repeats = 3
[[datasets.subsets]]
image_dir = "HERE/4_cat"
num_repeats = 2
"""
_REG = (
    _SETS
    + """
[[datasets.subsets]]
image_dir = "HERE/reg"
is_reg = true
class_tokens = "dog"
"""
)
_GUI = """
bucket_reso_steps = 64
caption_extension = ".txt"
dynamo_backend = "no"
epoch = 5
learning_rate = 1e-5
learning_rate_te1 = 1e-6
learning_rate_te2 = 1e-6
lr_scheduler = "cosine"
lr_scheduler_args = []
lr_warmup_steps = 2
max_train_steps = 20
mixed_precision = "no"
noise_offset_type = "Original"
optimizer_args = []
optimizer_type = "AdamW"
prior_loss_weight = 1
sample_every_n_epochs = 0
sample_prompts = ""
sample_sampler = "euler_a"
save_every_n_epochs = 0
save_last_n_steps = 0
train_batch_size = 2
training_comment = ""
xformers = true
"""
_COLAB = """
[sdxl_arguments]
cache_text_encoder_outputs = true
no_half_vae = true
min_timestep = 0
max_timestep = 1000
shuffle_caption = false
[dataset_arguments]
debug_dataset = false
[training_arguments]
max_train_epochs = 3
train_batch_size = 4
gradient_checkpointing = true
lowram = true
[optimizer_arguments]
optimizer_type = "Adafactor"
learning_rate = 4e-6
max_grad_norm = 0
optimizer_args = ["scale_parameter=False", "relative_step=False", "warmup_init=False"]
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 3
[saving_arguments]
save_every_n_epochs = 1
save_last_n_epochs = 0
"""
_ADAFACTOR = "--optimizer_type=Adafactor --max_grad_norm=0 --lr_scheduler=constant_with_warmup --lr_warmup_steps=2"
_ADAFACTOR_ARGS = 'optimizer_args = ["scale_parameter=False", "relative_step=False", "warmup_init=False"]\n'

LINES: tuple[PublicLine, ...] = (
    _line("plain steps", "--max_train_steps=8 --train_batch_size=2", DOG),
    _line("epochs", "--max_train_epochs=2 --train_batch_size=4", DOG),
    _line("epochs win over steps", "--max_train_epochs=2 --max_train_steps=9999 --train_batch_size=4", DOG),
    _line("accumulation", "--max_train_epochs=2 --train_batch_size=2 --gradient_accumulation_steps=4", DOG),
    _line("two classes", "--max_train_epochs=3 --train_batch_size=4", DOG_CAT),
    _line("repeats of the line beside class folders", "--max_train_epochs=1 --train_batch_size=4 --dataset_repeats=5", DOG),
    _line("rates of encoders that are not trained",
          "--max_train_epochs=1 --train_batch_size=4 --learning_rate=1e-5 --learning_rate_te1=5e-6 --learning_rate_te2=0", DOG,
          rates=(("unet", 1e-5),)),
    _line("text encoders", "--max_train_epochs=1 --train_batch_size=4 --train_text_encoder --learning_rate=4e-7", DOG, rates=_TWO),
    _line("text encoders, rates apart",
          "--max_train_epochs=1 --train_batch_size=4 --train_text_encoder --learning_rate=1e-5 --learning_rate_te1=1e-6"
          " --learning_rate_te2=2e-6", DOG, rates=(("unet", 1e-5), ("text_encoder_1", 1e-6), ("text_encoder_2", 2e-6))),
    _line("one text encoder frozen",
          "--max_train_epochs=1 --train_batch_size=4 --train_text_encoder --learning_rate=1e-5 --learning_rate_te2=0", DOG,
          rates=(("unet", 1e-5), ("text_encoder_1", 1e-5))),
    _line("a share of epochs saved, given in steps", "--max_train_steps=20 --train_batch_size=4 --save_n_epoch_ratio=2", DOG,
          saves=("last", "last-000001")),
    _line("saves by epoch", "--max_train_epochs=3 --train_batch_size=4 --save_every_n_epochs=1 --save_last_n_epochs=9", DOG,
          saves=("last", "last-000001", "last-000002")),
    _line("saves by step", "--max_train_steps=8 --train_batch_size=4 --save_every_n_steps=3 --save_last_n_steps=90", DOG,
          saves=("last", "last-step00000003", "last-step00000006")),
    _line("a window without saves", "--max_train_epochs=1 --train_batch_size=4 --save_last_n_steps=10", DOG),
    _line("no samples", "--max_train_epochs=1 --train_batch_size=4 --sample_every_n_steps=0 --sample_every_n_epochs=0", DOG),
    _line("buckets", "--max_train_epochs=2 --train_batch_size=4 --enable_bucket --min_bucket_reso=32 --max_bucket_reso=128", DOG),
    _line("no upscale", "--max_train_epochs=1 --train_batch_size=4 --enable_bucket --bucket_no_upscale --bucket_reso_steps=32"
          " --min_bucket_reso=32", DOG),
    _line("noise", "--max_train_epochs=1 --train_batch_size=4 --noise_offset=0.0357 --adaptive_noise_scale=0.00357"
          " --multires_noise_iterations=0 --min_snr_gamma=5", DOG),
    _line("v prediction", "--max_train_epochs=1 --train_batch_size=4 --v_parameterization --zero_terminal_snr"
          " --scale_v_pred_loss_like_noise_pred", DOG),
    _line("cached", "--max_train_epochs=1 --train_batch_size=4 --cache_latents --cache_text_encoder_outputs", DOG),
    _line("huber", "--max_train_epochs=1 --train_batch_size=4 --loss_type=smooth_l1 --huber_schedule=snr --huber_c=0.1", DOG),
    _line("long captions", "--max_train_epochs=1 --train_batch_size=4 --max_token_length=225 --shuffle_caption --keep_tokens=1"
          " --caption_dropout_rate=0.1 --caption_tag_dropout_rate=0.1", DOG),
    _line("Adafactor", f"--max_train_epochs=1 --train_batch_size=4 --learning_rate=4e-7 {_ADAFACTOR}", DOG,
          args=_ADAFACTOR_ARGS, rates=(("unet", 4e-7),)),
    _line("attention and memory", "--max_train_epochs=1 --train_batch_size=4 --xformers --mem_eff_attn --lowram --no_half_vae"
          " --gradient_checkpointing --persistent_data_loader_workers --max_data_loader_n_workers=0", DOG),
    _line("a dataset TOML", "--max_train_epochs=2", DOG_CAT, sets=_SETS, uses=16, batch=4),
    _line("a dataset TOML beside folders", "--max_train_epochs=2 --train_data_dir=/nowhere", DOG_CAT, sets=_SETS, uses=16, batch=4),
    _line("regularisation", "--max_train_epochs=1 --prior_loss_weight=0.5", DOG_CAT | {"reg": 16}, sets=_REG, uses=32, batch=4),
    _line("settings that the interface saved", "", DOG, args=_GUI, updates=20, rates=(("unet", 1e-5),)),
    _line("a notebook's file", "", DOG, args=_COLAB, updates=30, rates=(("unet", 4e-6),),
          saves=("last", "last-000001", "last-000002")),
)  # fmt: skip
FOR_REAL = ("rates of encoders that are not trained", "a share of epochs saved, given in steps", "a dataset TOML beside folders",
            "settings that the interface saved", "a notebook's file")  # fmt: skip
