"""Command lines and dataset files of the kinds that people publish for kohya's sdxl_train.py, rebuilt from their flags.

Each says what its images are; kohya's formulas, which stand here as his scripts have them, say what must come of it: the
uses of each image, the updates, the rates of every update by group, and the files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftrain.testing.pictures import picture, write_folder

DEFAULT_RATE = 2e-6
SIDE = 64
Size = tuple[int, int]
Folders = dict[str, tuple[Size, ...]]


@dataclass(frozen=True)
class Data:
    """One of kohya's data sets. repeats: folder -> uses of each image. reg: a folder of regularisation images."""

    batch: int
    repeats: dict[str, int]
    reg: str = ""


@dataclass(frozen=True)
class PublicLine:
    """One line, and what it says of itself where that is not read from its flags.

    folders: of images, by their sizes. sets: a dataset TOML, in which HERE is the folder of the data; args: kohya's --config_file;
    files: others, by name. data: what they make of the folders. rates: by group. schedule: name and updates of warm-up.
    stray: images that no folder has, which are left out. heard: what must be said.
    """

    name: str
    flags: str
    folders: Folders
    data: tuple[Data, ...]
    epochs: int
    steps: int
    accumulation: int = 1
    sets: str = ""
    args: str = ""
    files: dict[str, str] = field(default_factory=dict)
    rates: tuple[tuple[str, float], ...] = (("unet", DEFAULT_RATE),)
    schedule: tuple[str, int] = ("constant", 0)
    every_n_epochs: int = 0
    n_epoch_ratio: int = 0
    every_n_steps: int = 0
    stray: tuple[str, ...] = ()
    heard: tuple[str, ...] = ()


# ------------------------------------------------------------------ kohya's formulas


def uses_of(line: PublicLine) -> dict[str, list[int]]:
    """Return how often an epoch uses each image of a folder, sorted: DreamBoothDataset.__init__."""
    uses: dict[str, list[int]] = {}
    for data in line.data:
        own = {folder: [repeats] * len(line.folders[folder]) for folder, repeats in data.repeats.items()}
        if data.reg:  # as many of them as there are of the others, one after another
            full, more = divmod(sum(map(sum, own.values())), count := len(line.folders[data.reg]))
            own[data.reg] = [full] * (count - more) + [full + 1] * more
        uses |= own
    return uses


def bucket_of(line: PublicLine, size: Size) -> Size:
    """Return the bucket of an image: model_util.make_bucket_resolutions, BucketManager.select_bucket."""
    words = words_of(line.flags)
    if "enable_bucket" not in words:
        return SIDE, SIDE
    least, most, step = (
        int(words.get(name, default))
        for name, default in (("min_bucket_reso", 256), ("max_bucket_reso", 1024), ("bucket_reso_steps", 64))
    )
    if "bucket_no_upscale" in words:
        assert size[0] * size[1] <= SIDE * SIDE, "kohya shrinks it first"
        return size[0] - size[0] % step, size[1] - size[1] % step
    square = SIDE // step * step
    sizes = {(square, square)}
    for width in range(least, most + 1, step):
        height = min(most, SIDE * SIDE // width // step * step)
        if height >= least:
            sizes |= {(width, height), (height, width)}
    if size in sizes:
        return size
    return min(sorted(sizes), key=lambda each: abs(each[0] / each[1] - size[0] / size[1]))


def micro_batches(line: PublicLine) -> int:
    """Return the batches of an epoch: ceil(uses / batch) of each bucket of each data set: BucketManager, BucketBatchIndex."""
    total = 0
    for data in line.data:
        buckets: Counter[Size] = Counter()
        for folder, repeats in data.repeats.items():
            for size in line.folders[folder]:
                buckets[bucket_of(line, size)] += repeats
        if data.reg:  # regularisation images share one bucket with the others here
            ((bucket, uses),) = buckets.items()
            buckets[bucket] = 2 * uses
        total += sum(-(-uses // data.batch) for uses in buckets.values())
    return total


def updates_an_epoch(line: PublicLine) -> int:
    """Return math.ceil(len(train_dataloader) / gradient_accumulation_steps)."""
    return -(-micro_batches(line) // line.accumulation)


def updates_of(line: PublicLine) -> int:
    """Return max_train_steps, which epochs override."""
    return line.epochs * updates_an_epoch(line) or line.steps


def epochs_of(line: PublicLine) -> int:
    """Return num_train_epochs."""
    return -(-updates_of(line) // updates_an_epoch(line))


def factor(line: PublicLine, done: int) -> float:
    """Return what a rate is multiplied by after so many updates: train_util.get_scheduler_fix, diffusers' schedules."""
    name, warmup = line.schedule
    total = updates_of(line)
    if done < warmup and name != "constant":
        return done / max(1, warmup)
    share = (done - warmup) / max(1, total - warmup)
    if name == "cosine":
        return max(0.0, 0.5 * (1 + math.cos(math.pi * share)))
    return max(0.0, 1 - share) if name == "linear" else 1.0


def files_of(line: PublicLine) -> set[str]:
    """Return the names of exports: get_epoch_ckpt_name, get_step_ckpt_name, get_last_ckpt_name."""
    total, epochs = updates_of(line), epochs_of(line)
    every = max(1, epochs // line.n_epoch_ratio) if line.n_epoch_ratio else line.every_n_epochs
    names = {"last"}
    names |= {f"last-{epoch:06d}" for epoch in range(1, epochs) if every and epoch % every == 0}
    if line.every_n_steps:
        names |= {f"last-step{step:08d}" for step in range(line.every_n_steps, total + 1, line.every_n_steps)}
    return names


# ------------------------------------------------------------------ lines


def words_of(flags: str) -> dict[str, str]:
    """Return the flags of a line, by name."""
    return dict(word.removeprefix("--").partition("=")[::2] for word in flags.split())


def _line(name: str, flags: str, folders: dict[str, int | tuple[Size, ...]], **more: Any) -> PublicLine:
    """Make a line; what its flags say need not be said again."""
    words = words_of(flags)
    sized = {key: ((SIDE, SIDE),) * sizes if isinstance(sizes, int) else sizes for key, sizes in folders.items()}
    classes = {folder: int(folder.partition("_")[0]) for folder in sized if folder[0].isdigit()}
    given = {
        "data": (Data(int(words.get("train_batch_size", 1)), classes),),
        "epochs": int(words.get("max_train_epochs", 0)),
        "steps": int(words.get("max_train_steps", 1600)),
        "accumulation": int(words.get("gradient_accumulation_steps", 1)),
        "every_n_epochs": int(words.get("save_every_n_epochs", 0)),
        "n_epoch_ratio": int(words.get("save_n_epoch_ratio", 0)),
        "every_n_steps": int(words.get("save_every_n_steps", 0)),
    }
    return PublicLine(name, flags, sized, **given | more)


def write(line: PublicLine, folder: Path) -> list[str]:
    """Write what a line is about; return its words."""
    data = folder / "data"
    for number, (name, sizes) in enumerate(line.folders.items()):
        write_folder(data / name, sizes, start=100 * number)
    for number, name in enumerate(line.stray, start=900):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(picture(number, (SIDE, SIDE)))
    for name, text in line.files.items():
        (folder / name).write_text(text.replace("HERE", str(data)))
    words = ["--init_from_config=tiny", f"--output_dir={folder / 'out'}", f"--cache_dir={folder / 'cache'}"]
    words += [*line.flags.replace("FILES", str(folder)).split(), "--max_data_loader_n_workers=0"]
    if line.sets:
        (folder / "sets.toml").write_text(line.sets.replace("HERE", str(data)))
        words.append(f"--dataset_config={folder / 'sets.toml'}")
    elif "--dataset_config" not in line.flags:
        words += [f"--train_data_dir={data}", f"--resolution={SIDE},{SIDE}"]
    if line.args:
        (folder / "args.toml").write_text(line.args)
        words.append(f"--config_file={folder / 'args.toml'}")
    return words


DOG, DOG_CAT = {"3_sks dog": 3}, {"2_sks dog": 3, "3_cat": 1}  # 9 uses each
_WIDE, _TALL = (128, 32), (32, 128)
_MIXED = {"1_dog": ((SIDE, SIDE),) * 14 + (_WIDE,) * 10 + (_TALL,) * 3 + ((96, 32),) * 3}
_BUCKETS = "--enable_bucket --min_bucket_reso=32 --max_bucket_reso=128 --bucket_reso_steps=32"
_BOTH = (("unet", 4e-7), ("text_encoder_1", 4e-7), ("text_encoder_2", 4e-7))
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
image_dir = "HERE/3_cat"
num_repeats = 2
"""
_OF_SETS = Data(4, {"2_sks dog": 3, "3_cat": 2})
_REG = (
    _SETS
    + """
[[datasets.subsets]]
image_dir = "HERE/reg"
is_reg = true
class_tokens = "dog"
"""
)
_TWO_SETS = (
    _SETS
    + """
[[datasets]]
resolution = 64
batch_size = 2
[[datasets.subsets]]
image_dir = "HERE/more"
"""
)
_METADATA = """
[[datasets]]
resolution = 64
batch_size = 2
[[datasets.subsets]]
image_dir = "HERE/meta"
metadata_file = "HERE/../meta.jsonl"
num_repeats = 2
"""
_JSON_SETS = json.dumps(
    {"datasets": [{"resolution": 64, "batch_size": 2, "subsets": [{"image_dir": "HERE/more", "num_repeats": 3}]}]}
)
_LINES_OF_JSON = "".join(
    json.dumps({"image_path": f"HERE/meta/{n:04d}.png", "caption": f"a dog, {n}", "tags": "red"}) + "\n"
    for n in range(3)
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
max_train_steps = 12
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
lr_warmup_steps = 2
[saving_arguments]
save_every_n_epochs = 1
save_last_n_epochs = 0
"""
_ADAFACTOR = "--optimizer_type=Adafactor --max_grad_norm=0 --lr_scheduler=constant_with_warmup --lr_warmup_steps=2"
_ADAFACTOR_ARGS = 'optimizer_args = ["scale_parameter=False", "relative_step=False", "warmup_init=False"]\n'
_ONCE = "--max_train_epochs=1 --train_batch_size=4"

LINES: tuple[PublicLine, ...] = (
    _line("steps", "--max_train_steps=8 --train_batch_size=2", DOG),
    _line("epochs", "--max_train_epochs=2 --train_batch_size=4", DOG),
    _line("epochs win over steps", "--max_train_epochs=2 --max_train_steps=9999 --train_batch_size=4", DOG),
    _line("accumulation", "--max_train_epochs=2 --train_batch_size=2 --gradient_accumulation_steps=3", DOG),
    _line("thirty images in four buckets", f"--max_train_epochs=1 --train_batch_size=8 --gradient_accumulation_steps=2 {_BUCKETS}", _MIXED),
    _line("a batch that no bucket fills", f"--max_train_epochs=2 --train_batch_size=16 {_BUCKETS}", _MIXED),
    _line("two classes", "--max_train_epochs=3 --train_batch_size=4", DOG_CAT),
    _line("repeats of the line beside class folders", f"{_ONCE} --dataset_repeats=5", DOG, heard=("--dataset_repeats",)),
    _line("a stray image beside a class folder", _ONCE, DOG, stray=("cover.png", "3_sks dog/more/deep.png"), heard=("2 images",)),
    _line("a folder that is a number", "--max_train_epochs=1 --train_batch_size=2", {"7": 1, "2_cat": 2}, heard=("no class words in 7",)),
    _line("rates of encoders that are not trained", f"{_ONCE} --learning_rate=1e-5 --learning_rate_te1=5e-6 --learning_rate_te2=0", DOG,
          rates=(("unet", 1e-5),), heard=("--learning_rate_te1",)),
    _line("text encoders", f"{_ONCE} --train_text_encoder --learning_rate=4e-7", DOG, rates=_BOTH),
    _line("text encoders, rates apart", f"{_ONCE} --train_text_encoder --learning_rate=1e-5 --learning_rate_te1=1e-6"
          " --learning_rate_te2=2e-6 --lr_scheduler=cosine --lr_warmup_steps=1", DOG, schedule=("cosine", 1),
          rates=(("unet", 1e-5), ("text_encoder_1", 1e-6), ("text_encoder_2", 2e-6))),
    _line("one text encoder frozen", f"{_ONCE} --train_text_encoder --learning_rate=1e-5 --learning_rate_te2=0", DOG,
          rates=(("unet", 1e-5), ("text_encoder_1", 1e-5))),
    _line("a share of the steps as warm-up", "--max_train_steps=10 --train_batch_size=4 --lr_scheduler=linear --lr_warmup_steps=0.2"
          " --learning_rate=1e-5", DOG, schedule=("linear", 2), rates=(("unet", 1e-5),)),
    _line("all steps as warm-up", "--max_train_steps=6 --train_batch_size=4 --lr_scheduler=constant_with_warmup"
          " --lr_warmup_steps=100% --learning_rate=1e-5", DOG, schedule=("constant_with_warmup", 6), rates=(("unet", 1e-5),)),
    _line("a share of epochs saved, given in steps", "--max_train_steps=12 --train_batch_size=4 --save_n_epoch_ratio=2", DOG),
    _line("saves by epoch", "--max_train_epochs=3 --train_batch_size=4 --save_every_n_epochs=1 --save_last_n_epochs=9", DOG),
    _line("saves by step", "--max_train_steps=8 --train_batch_size=4 --save_every_n_steps=3 --save_last_n_steps=90", DOG),
    _line("a window without saves", f"{_ONCE} --save_last_n_steps=10", DOG, heard=("--save_last_n_steps",)),
    _line("no samples", f"{_ONCE} --sample_every_n_steps=0 --sample_every_n_epochs=0", DOG, heard=("--sample_every_n_steps",)),
    _line("prompts with options that are none", f"{_ONCE} --sample_prompts=FILES/prompts.txt --sample_every_n_epochs=1", DOG,
          files={"prompts.txt": "a dog --w 64 --h 64 --s 1 --d -1\na cat --w 64 --h 64 --s 1 --l x --ss unknown\n"}, heard=("--ss",)),
    _line("buckets", f"--max_train_epochs=2 --train_batch_size=4 {_BUCKETS}", {"1_dog": (_WIDE, _TALL, (SIDE, SIDE), (50, 60), (90, 40))}),
    _line("no upscale", f"{_ONCE} {_BUCKETS} --bucket_no_upscale", {"2_dog": ((SIDE, SIDE), (40, 40), (40, 70), (33, 65))}),
    _line("noise", f"{_ONCE} --noise_offset=0.0357 --adaptive_noise_scale=0.00357 --multires_noise_iterations=0 --min_snr_gamma=5", DOG),
    _line("v prediction", f"{_ONCE} --v_parameterization --zero_terminal_snr --scale_v_pred_loss_like_noise_pred", DOG),
    _line("cached", f"{_ONCE} --cache_latents --cache_text_encoder_outputs", DOG),
    _line("huber", f"{_ONCE} --loss_type=smooth_l1 --huber_schedule=snr --huber_c=0.1", DOG),
    _line("long captions", f"{_ONCE} --max_token_length=225 --shuffle_caption --keep_tokens=1 --caption_dropout_rate=0.1"
          " --caption_tag_dropout_rate=0.1 --weighted_captions", DOG),
    _line("Adafactor", f"--max_train_epochs=2 --train_batch_size=4 --learning_rate=4e-7 {_ADAFACTOR}", DOG,
          args=_ADAFACTOR_ARGS, rates=(("unet", 4e-7),), schedule=("constant_with_warmup", 2)),
    _line("attention and memory", f"{_ONCE} --xformers --mem_eff_attn --lowram --no_half_vae --gradient_checkpointing"
          " --persistent_data_loader_workers", DOG),
    _line("a dataset TOML", "--max_train_epochs=2", DOG_CAT, sets=_SETS, data=(_OF_SETS,)),
    _line("a dataset TOML beside folders", "--max_train_epochs=2 --train_data_dir=/nowhere", DOG_CAT, sets=_SETS, data=(_OF_SETS,),
          heard=("/nowhere",)),
    _line("datasets of two batch sizes", "--max_train_epochs=1 --gradient_accumulation_steps=2", DOG_CAT | {"more": 5}, sets=_TWO_SETS,
          data=(_OF_SETS, Data(2, {"more": 1}))),
    _line("regularisation", "--max_train_epochs=1 --prior_loss_weight=0.5", DOG_CAT | {"reg": 4}, sets=_REG,
          data=(Data(4, _OF_SETS.repeats, "reg"),)),
    _line("metadata a line an image", "--max_train_epochs=1", {"meta": 3}, sets=_METADATA, files={"meta.jsonl": _LINES_OF_JSON},
          data=(Data(2, {"meta": 2}),)),
    _line("datasets as JSON", "--max_train_epochs=1 --dataset_config=FILES/sets.json", {"more": 3}, files={"sets.json": _JSON_SETS},
          data=(Data(2, {"more": 3}),)),
    _line("settings that the interface saved", "", DOG, args=_GUI, steps=12, data=(Data(2, {"3_sks dog": 3}),),
          rates=(("unet", 1e-5),), schedule=("cosine", 2), heard=("epoch", "noise_offset_type")),
    _line("a notebook's file", "", DOG, args=_COLAB, epochs=3, data=(Data(4, {"3_sks dog": 3}),), rates=(("unet", 4e-6),),
          schedule=("constant_with_warmup", 2), every_n_epochs=1),
)  # fmt: skip
