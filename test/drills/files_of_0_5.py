"""Have version 0.5 write the files that test/integration/test_files_of_0_5.py resumes.

    python test/drills/files_of_0_5.py [--out FOLDER]

Checks version 0.5 out, runs its own entry points below PLACE with tiny models, pictures and caches, and packs for each
family FAMILY-data.tar.xz, what a run reads, its index and cache included, and FAMILY-run.tar.xz: the run's folder at
step HALF, and in `expected/` weights, average and losses that 0.5 itself had at step STEPS. Run once; the archives
change only where they should hold more. About a minute on two cores.

PLACE is a fixed path, because an index is named by a hash of where its data are: the test unpacks to the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from archives import unpack_tar
from machine_kind import machine_kind

ROOT = Path(__file__).resolve().parents[2]
# The last commit of 0.5's product: its child, 6bc6fee, turns the families into data on a kit. It is in the main line's
# history, and 97d54ab before it set the version.
COMMIT = "49922af8c13e"
PLACE = Path("/var/tmp/difftrain-files-of-0.5")
HALF, STEPS = 3, 6
WRITTEN = 1_750_000_000  # s: when every file that is read was changed, to the second, which is all a tar keeps
SIZES = ((64, 64), (64, 32), (32, 64), (64, 64))
CLIP = {
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "projection_dim": 4,
    "max_position_embeddings": 77,
}
ENCODERS = {
    "text_encoder": CLIP | {"vocab_size": 576, "hidden_act": "quick_gelu", "bos_token_id": 574, "eos_token_id": 575},
    "text_encoder_2": CLIP
    | {"vocab_size": 544, "hidden_act": "gelu", "bos_token_id": 542, "eos_token_id": 543, "pad_token_id": 0},
}
VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [4, 4, 4, 4],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": 64,
    "scaling_factor": 0.5,
    "force_upcast": True,
}
SD3 = {
    "family": "sd3",
    "name": "smallest",
    "init": "fan_in",
    "transformer": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 1,
        "joint_attention_dim": 8,
        "caption_projection_dim": 8,
        "pooled_projection_dim": 8,
        "pos_embed_max_size": 8,
    },
    "vae": VAE | {"shift_factor": 0.0609},
    **ENCODERS,
    "text_encoder_3": {"vocab_size": 384, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2},
}
SDXL = {
    "family": "sdxl",
    "name": "smallest",
    "unet": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [4, 4],
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "transformer_layers_per_block": [1, 1],
        "attention_head_dim": [1, 1],
        "cross_attention_dim": 8,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 2,
        "projection_class_embeddings_input_dim": 16,
    },
    "vae": VAE,
    **ENCODERS,
}
RECIPE = f"""
train_type = "sd3_light_pretrain"

[output]
output_dir = "runs"

[model]
type = "sd3"
diffusers_path = "model"
num_layers = {SD3["transformer"]["num_layers"]}
dtype = "float32"
t5_max_length = 16

[training]
micro_batch_size_per_gpu = 2
warmup_steps = 2
seed = 1

[optimizer]
type = "adamw"
lr = 1e-2
eps = 1e-3

[ema]
enable = true
decay = 0.9
update_every = 2

[save]
save_every_n_steps = 100
state = true

[data]
dirs = ["pictures"]
repeats = [4]
resolution = [64, 64]
enable_bucket = true
min_bucket_reso = 32
max_bucket_reso = 64
num_dataloader_workers = 0
cache_dir = "cache"

[cache]
latents_to_disk = true
text_to_disk = true

[logging]
log_every = 1
"""
FLAGS = (
    "--init_from_config=sizes.json", "--train_data_dir=pictures", "--output_name=model", "--resolution=64,64",
    "--enable_bucket", "--min_bucket_reso=32", "--max_bucket_reso=64", "--train_batch_size=2", "--learning_rate=1e-2",
    "--optimizer_type=AdamW", "--optimizer_args", "eps=1e-3", "--lr_scheduler=cosine", "--lr_warmup_steps=2",
    f"--max_train_steps={STEPS}", "--use_ema", "--ema_decay=0.9", "--seed=1", f"--save_every_n_steps={HALF}",
    "--save_state", "--save_model_as=safetensors", "--log_every=1", "--max_data_loader_n_workers=0",
    "--cache_dir=cache", "--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk",
)  # fmt: skip


TRAIN = ("code/sd_scripts_xl/train.py", "--config=run.toml")
PRETRAIN = ("code/sd_scripts_xl/sdxl_pretrain.py", *FLAGS)
# What runs says neutral names of machine and Python, since what it writes is kept.
NEUTRAL = """
import platform, socket, sys
socket.gethostname = platform.node = lambda: "machine"
sys.executable = "python"
"""
# what nothing reads again: reports, with the processor's name in them, logs and exports
LEFT_OUT = shutil.ignore_patterns("report.*", "tensorboard_logs", "*.log", "step*", "model*.safetensors", "*.lock")


def main() -> int:
    """Write both archives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "test" / "integration" / "files_of_0_5")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for make in (_sd3, _sdxl):
        PLACE.mkdir(mode=0o700)
        try:
            _check_out(PLACE / "code")
            _write_pictures(PLACE / "pictures")
            _pack(out, make.__name__.strip("_"), *make())
        finally:
            shutil.rmtree(PLACE)
    return 0


def _sd3() -> tuple[Path, Path, tuple[str, ...]]:
    """Train by train.py from a folder of diffusers: HALF steps that are to become more.

    Returns: what is resumed, what was to come of it, and the command that resumes.
    """
    (PLACE / "sizes.json").write_text(json.dumps(SD3), encoding="utf-8")
    (PLACE / "run.toml").write_text(RECIPE, encoding="utf-8")
    _run("-m", "difftrain.cli", "init", "sd3_light", "--size=sizes.json", "--output=model", "--seed=1")
    _set_times(PLACE / "model")
    _run(*TRAIN, f"--training.max_steps={STEPS}", "--output.output_dir=straight")
    _run(*TRAIN, f"--training.max_steps={HALF}")
    (straight,) = (PLACE / "straight").iterdir()
    return (
        PLACE / "runs",
        straight / f"global_step{STEPS}",
        (*TRAIN, f"--training.max_steps={STEPS}", "--resume_from_checkpoint"),
    )


def _sdxl() -> tuple[Path, Path, tuple[str, ...]]:
    """Train by sdxl_pretrain.py from random weights: a run that a signal stopped; returns what _sd3 does."""
    (PLACE / "sizes.json").write_text(json.dumps(SDXL), encoding="utf-8")
    _run(*PRETRAIN, "--output_dir=straight")
    command, runs = (*PRETRAIN, "--output_dir=runs"), PLACE / "runs"
    while True:
        process = _start(*command)
        while process.poll() is None and _steps_done(runs) < HALF:
            time.sleep(0.001)
        process.terminate()
        if process.wait() == 128 + signal.SIGTERM:
            return runs, PLACE / "straight" / "model-state", (*command, "--resume=auto")
        shutil.rmtree(runs)  # it was done before the signal came


def _check_out(folder: Path) -> None:
    """Put the files of COMMIT into a folder."""
    archive = folder.parent / f"{folder.name}.tar"
    subprocess.run(["git", "archive", f"--output={archive}", COMMIT], cwd=ROOT, check=True)
    unpack_tar(archive, folder)
    archive.unlink()
    (folder / "neutral").mkdir()
    (folder / "neutral" / "sitecustomize.py").write_text(NEUTRAL, encoding="utf-8")


def _start(*words: str) -> subprocess.Popen[bytes]:
    """Start a command of version 0.5, on one thread, in PLACE."""
    environment = {
        "HOME": str(PLACE / "home"),
        "XDG_CACHE_HOME": str(PLACE / "home"),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": "code/neutral:code/library",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, *words], cwd=PLACE, env=environment)


def _run(*words: str) -> None:
    """Run a command of version 0.5 to its end."""
    if code := _start(*words).wait():
        raise RuntimeError(f"{words} ended with {code}")


def _write_pictures(folder: Path) -> None:
    folder.mkdir()
    for number, size in enumerate(SIZES):
        pixels = np.random.Generator(np.random.Philox(number)).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}, soft colours", encoding="utf-8")
    _set_times(folder)


def _set_times(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (WRITTEN, WRITTEN))


def _steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def _pack(out: Path, name: str, resumed: Path, end: Path, command: tuple[str, ...]) -> None:
    """Write NAME-data.tar.xz, what a run reads, and NAME-run.tar.xz, what is resumed and what 0.5 had at the end."""
    data, run = PLACE / "packed" / "data", PLACE / "packed" / "run"
    for path in (PLACE / each for each in ("pictures", "model", "sizes.json", "run.toml", "cache")):
        if path.is_dir():
            shutil.copytree(path, data / path.name)
        elif path.exists():
            shutil.copy2(path, data)
    shutil.copytree(resumed, run / "runs", ignore=LEFT_OUT)
    for claim in run.rglob(".claim/*.json"):  # released; when this machine was started is nobody's concern
        claim.write_text(json.dumps(json.loads(claim.read_text()) | {"boot": "another"}), encoding="utf-8")
    expected = run / "expected"
    expected.mkdir()
    for tensors in ("weights", "ema"):
        shutil.copy(end / f"{tensors}-00000.safetensors", expected / f"{tensors}.safetensors")
    metrics = (end.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["step_loss"] for line in metrics]
    facts = {"commit": COMMIT, "command": command, "losses": losses, "machine": machine_kind()}
    (expected / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for folder in (data, run):
        archive = out / f"{name}-{folder.name}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(folder, ".", filter=_anonymous)
        print(f"{archive.name}: {archive.stat().st_size} bytes")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


if __name__ == "__main__":
    sys.exit(main())
