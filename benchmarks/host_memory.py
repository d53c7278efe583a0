"""Host memory of a run over a model of a released size: Flux.1, 11.9 B parameters in bf16, a subset of them trained.

Writes a random folder of that size (once, kept in --folder: 33 GB with its encoders), fills the caches with the encoders, loads
the transformer, and takes a step of what is trained at a small picture. A process of its own is watched from outside:
  anonymous   memory that nothing can take back: the figure that decides whether a machine holds the run
  resident    with the pages of mapped files, which the system takes back where it needs them
    python benchmarks/host_memory.py --folder=DIR [--depth=1.0] [--limit_gib=24]
Prints a line a figure and exits with 1 where anonymous memory was above the limit at any moment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "library"))
GIB = 1024.0**2  # of KiB
PICTURES = 4
# FLUX.1-dev's sizes, and those of its encoders
SIZES = {
    "family": "flux",
    "name": "dev",
    "init": "fan_in",
    "transformer": {"guidance_embeds": True},
    "vae": {
        "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16, "scaling_factor": 0.3611,
        "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
    },
    "text_encoder": {
        "vocab_size": 834, "hidden_size": 768, "intermediate_size": 3072, "projection_dim": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "bos_token_id": 832, "eos_token_id": 833, "pad_token_id": 833,
    },
    "text_encoder_2": {
        "vocab_size": 2048, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip

RUN = """
[output]
output_dir = "{home}/runs"
dataset = "{data}"
[model]
type = "flux"
diffusers_path = "{home}/model"
dtype = "bfloat16"
t5_max_length = 32
train_only = ['^transformer_blocks\\.0\\.attn\\.to_[qkv]\\.']
[training]
max_steps = {steps}
micro_batch_size_per_gpu = 1
seed = 1
[optimizer]
type = "adamw"
lr = 1e-4
[save]
save_dtype = "bfloat16"
[optimization]
activation_checkpointing = true
[data]
num_dataloader_workers = 0
cache_dir = "{home}/cache"
[monitoring]
logging_steps = 1
"""


def main() -> int:
    """Make the folder where it is missing, run, watch, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit_gib", type=float, default=24.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--depth", type=float, default=1.0, help="this part of every part's blocks; their widths stay")
    asked = parser.parse_args()
    home = asked.folder.resolve()
    home.mkdir(parents=True, exist_ok=True)
    model = home / "model"
    if not model.is_dir():
        sizes = home / "sizes.json"
        sizes.write_text(json.dumps(at_depth(asked.depth)), encoding="utf-8")
        words = ["init", "flux", f"--size={sizes}", f"--output={model}", "--seed=1", "--save_precision=bf16"]
        watched("init", [sys.executable, "-m", "difftrain.cli", *words])
    file = home / "run.toml"
    file.write_text(RUN.format(home=home, data=data_of(home), steps=asked.steps), encoding="utf-8")
    words = [str(ROOT / "sd_scripts_xl" / "train.py"), "--config", str(file)]
    peak = watched("train", [sys.executable, *words])
    return 1 if peak > asked.limit_gib else 0


def data_of(home: Path) -> Path:
    """Write a few small pictures with captions, and the file that names them: a CPU takes long for a big encoder."""
    from difftrain.testing.pictures import write_folder

    file = home / "data.toml"
    pictures = write_folder(home / "pictures", [(64, 64)] * PICTURES)
    file.write_text(f'resolutions = [64]\n[[directory]]\npath = "{pictures}"\n', encoding="utf-8")
    return file


def at_depth(depth: float) -> dict[str, Any]:
    """Return the sizes with this part of their blocks, one at least of each kind."""
    sizes: dict[str, Any] = json.loads(json.dumps(SIZES))
    for part, field, blocks in (
        ("transformer", "num_layers", 19),
        ("transformer", "num_single_layers", 38),
        ("text_encoder_2", "num_layers", 24),
    ):
        sizes[part][field] = max(1, round(depth * blocks))
    return sizes


def watched(name: str, command: list[str]) -> float:
    """Run a command and its children, print what they held at most, and return the anonymous memory in GiB."""
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "library")})
    peaks = {"anonymous": 0.0, "resident": 0.0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            for key, value in memory_of(process.pid).items():
                peaks[key] = max(peaks[key], value)

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    done.set()
    thread.join()
    print(f"{name}: exit {code}, {time.monotonic() - started:.0f} s", flush=True)
    for key, value in peaks.items():
        print(f"{name}: {key} {value:.2f} GiB at most", flush=True)
    if code:
        raise SystemExit(code)
    return peaks["anonymous"]


def memory_of(pid: int) -> dict[str, float]:
    """Return anonymous and resident memory of a process, in GiB; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    said = {line.split(":")[0]: float(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {"anonymous": said.get("RssAnon", 0.0) / GIB, "resident": said.get("VmRSS", 0.0) / GIB}


if __name__ == "__main__":
    sys.exit(main())
