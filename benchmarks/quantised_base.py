"""What a base in few bits costs: in the loss, in time, and in memory while it is loaded.

  losses   a tiny Flux is trained on shapes from nothing; from there an adapter for 50 steps over a base of each kind: mean
           loss over that with a base in bf16
  share    forward and backward of two blocks of Flux with adapters, tokens as of a picture: the part of the time that a base
           of each kind takes more than one in bf16, alternating
  memory   a file of a Flux's transformer in bf16 is written (below --folder, kept), and loaded into a base by a process of its
           own: anonymous memory at most, over the bytes that are stored in the end
    python benchmarks/quantised_base.py [losses] [share] [memory] [--billions=0.6] [--kind=fp8] [--folder=DIR]
Prints a line a figure, and exits with 1 where a limit is missed: 1.01 and 0.99, 0.20, 1.10 and 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "library"))
KINDS = ("fp8", "int8", "nf4")
GIB = 1024.0**3
ADAPTER = {"type": "lora", "rank": 8}
TINY = ROOT / "library/difftrain/models/sizes_shipped/flux.tiny.json"
PARTS = ("losses", "share", "memory")


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all of them")
    parser.add_argument("--steps", type=int, default=300, help="of the training from nothing (losses)")
    parser.add_argument("--width", type=int, default=1536, help="of the two blocks (share)")
    parser.add_argument("--tokens", type=int, default=1024, help="of the picture, beside 128 of text (share)")
    parser.add_argument("--device", default="cpu", help="that the blocks run on (share)")
    parser.add_argument("--billions", type=float, default=0.6, help="weights of the transformer (memory)")
    parser.add_argument("--kind", choices=KINDS, default="fp8", help="of the base that is loaded (memory)")
    parser.add_argument("--folder", type=Path, help="where the file is kept (memory); unset: a temporary folder")
    asked = parser.parse_args()
    if unknown := [part for part in asked.parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; known are {', '.join(PARTS)}")
    wanted, missed = asked.parts or PARTS, False
    if "losses" in wanted:
        missed |= any(abs(ratio - 1) > 0.01 for ratio in losses(asked.steps))
    if "share" in wanted:
        missed |= any(part > 0.20 for part in shares(asked.width, asked.tokens, asked.device))
    if "memory" in wanted:
        with tempfile.TemporaryDirectory() as aside:
            missed |= not memory(asked.folder or Path(aside), asked.billions, asked.kind)
    return int(missed)


def config(kind: str | None, *, precision: str = "no", adapter: bool = True, **model: Any) -> Any:
    """Return the configuration of a Flux, with adapters over a base or trained as a whole."""
    from difftrain.config import TrainConfig

    model = {"family": "flux", "t5_max_length": 16, "init_from_config": str(TINY), "base_dtype": kind} | model
    given = {"model": model, "training": {"seed": 1, "mixed_precision": precision}}
    return TrainConfig.model_validate({**given, "adapter": ADAPTER} if adapter else given)


# --- the loss


def losses(steps: int) -> Iterator[float]:
    """Train a tiny model, then adapters over it; yield the ratio of each kind's mean loss."""
    from difftrain.models.registry import make_family

    cfg = config(None, adapter=False)
    family: Any = make_family(cfg)
    parts = family.load()
    whole = trained(family, parts, steps, 2e-3, first=0)
    print(f"losses: from nothing {whole[0]:.4f} to {statistics.mean(whole[-20:]):.4f} in {steps} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        weights = ((name, value.detach()) for name, value in parts.root.state_dict().items())
        file = family.export(weights, parts, "safetensors", Path(folder) / "trained", metadata={})
        means = {}
        for kind in ("bf16", *KINDS):
            family = make_family(config(kind, transformer=str(file)))
            means[kind] = statistics.mean(trained(family, family.load(), 50, 1e-3, first=steps))
            ratio = means[kind] / means["bf16"]
            print(f"losses: {kind} {means[kind]:.5f}, {ratio:.4f} of bf16's (limit 0.99 to 1.01)", flush=True)
            yield ratio


def trained(family: Any, parts: Any, steps: int, rate: float, first: int) -> list[float]:
    """Take steps on shapes; return the losses."""
    import torch

    weights = [weight for weight in parts.root.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    made = []
    for step in range(first, first + steps):
        inputs = family.inputs(batch_of(family, parts, step), parts)
        loss = family.loss_sums(family.forward(parts.root, inputs), inputs)["loss"] / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made.append(float(loss.detach()))
    return made


def batch_of(family: Any, parts: Any, step: int) -> Any:
    """Draw eight shapes with captions, and what training draws for them."""
    import numpy as np
    import torch

    from difftrain.contracts import Batch, Bucket, Draw
    from difftrain.data.samples import host_draws
    from difftrain.demo.datasets import draw, scenes

    drawn = list(scenes(8, step))
    pixels = torch.stack(
        [torch.from_numpy(np.array(draw(scene, 64).convert("RGB"))).permute(2, 0, 1) for scene in drawn]
    )
    uses = [Draw(i, (8 * step + i).to_bytes(16, "little"), 0) for i in range(8)]
    bucket, ids = Bucket(64, 64), torch.arange(8)
    features = {"pixels": pixels, **family.tokenizer(parts)([scene.caption for scene in drawn])}
    draws = {name: host_draws(name, spec, bucket, uses, 0) for name, spec in family.features.draws.items()}
    return Batch(bucket, ids, torch.zeros_like(ids), features, draws, keys=tuple(use.key for use in uses), step=step)


# --- time


def shares(width: int, tokens: int, device: str) -> Iterator[float]:
    """Time two blocks over bases of all kinds, in turns; yield the share of each that bf16 does not take."""
    import torch

    sizes = sizes_of(
        {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": width // 128, "attention_head_dim": 128}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sizes.json"
        file.write_text(json.dumps(sizes), encoding="utf-8")
        steps = {kind: step_of(str(file), kind, tokens, device) for kind in ("bf16", *KINDS)}
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(4):  # the first warms up
        for kind, step in steps.items():
            started = clock()
            step()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:
                seconds[kind].append(clock() - started)
    fastest = {kind: min(times) for kind, times in seconds.items()}
    for kind in KINDS:
        share = 1 - fastest["bf16"] / fastest[kind]
        print(f"share: {kind} {share:.3f} of {fastest[kind]:.2f} s, width {width}, {tokens} + 128 tokens, {device}, "
              f"{torch.get_num_threads()} threads (limit 0.20)", flush=True)  # fmt: skip
        yield share


def sizes_of(transformer: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny sizes with another transformer."""
    sizes: dict[str, Any] = json.loads(TINY.read_text(encoding="utf-8"))
    heads = sizes["transformer"] | transformer
    if "attention_head_dim" in transformer:
        side = transformer["attention_head_dim"]
        heads["axes_dims_rope"] = [side // 8, side * 7 // 16, side * 7 // 16]
    return {**sizes, "transformer": heads, "init": "fan_in"}


def step_of(sizes: str, kind: str, tokens: int, device: str) -> Any:
    """Return forward and backward of a picture of so many tokens."""
    import torch

    from difftrain.contracts import Bucket
    from difftrain.models.flops import blank_inputs
    from difftrain.models.registry import make_family

    cfg = config(kind, precision="bf16", init_from_config=sizes, t5_max_length=128)
    family: Any = make_family(cfg)
    root = family.load().root.to(device)
    side = round(tokens**0.5) * family.token
    inputs = blank_inputs(family, Bucket(side, side), device)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            (velocity,) = root(inputs.x_t, inputs.timestep, inputs.conditions)
        velocity.float().square().mean().backward()

    return step


# --- memory


def memory(folder: Path, billions: float, kind: str) -> bool:
    """Write a file of so many weights, load it in a process of its own, and tell whether memory kept within its limit."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = max(1, round(billions / 11.9 * 19))
    sizes, home = folder / f"sizes-{blocks}.json", folder / f"transformer-{blocks}"
    file = home / "diffusion_pytorch_model.safetensors"
    full = {"num_layers": blocks, "num_single_layers": 2 * blocks, "num_attention_heads": 24, "attention_head_dim": 128,
            "joint_attention_dim": 4096, "guidance_embeds": True}  # fmt: skip
    made = matching(sizes_of(full))
    sizes.write_text(json.dumps(made), encoding="utf-8")
    home.mkdir(exist_ok=True)
    (home / "config.json").write_text(json.dumps(made["transformer"]), encoding="utf-8")
    if not file.is_file():
        started = time.monotonic()
        count = write(config(None, init_from_config=str(sizes)), file)
        print(f"memory: {count / 1e9:.2f} billion weights written in {time.monotonic() - started:.0f} s", flush=True)
    started = time.monotonic()
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); from quantised_base import load; load(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(sizes), str(home), kind], check=True, stdout=subprocess.PIPE, text=True
    )
    peak, stored, count, before = json.loads(done.stdout.splitlines()[-1])
    limit = 1.1 * stored + GIB
    print(f"memory: {count / 1e9:.2f} billion weights in {kind}, {time.monotonic() - started:.0f} s: anonymous "
          f"{peak / GIB:.2f} GiB at most, {before / GIB:.2f} of them before; {stored / GIB:.2f} GiB are stored "
          f"(limit {limit / GIB:.2f})", flush=True)  # fmt: skip
    return bool(peak <= limit)


def matching(sizes: dict[str, Any]) -> dict[str, Any]:
    """Make the tiny encoders as wide as the transformer reads them."""
    sizes["text_encoder_2"] = sizes["text_encoder_2"] | {"d_model": sizes["transformer"]["joint_attention_dim"]}
    return sizes


def write(cfg: Any, file: Path) -> int:
    """Write random weights of a transformer in bf16, a tensor at a time: pieces of one million numbers, over and over."""
    import torch

    from difftrain.models.registry import make_family
    from difftrain.models.weights.writers import safetensors_writer

    family: Any = make_family(cfg)
    shapes = {name: tuple(value.shape) for name, value in family.source.build("transformer").state_dict().items()}
    drawn = (0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))).bfloat16()
    aside = file.with_suffix(".part")
    with safetensors_writer(aside, {name: (torch.bfloat16, shape) for name, shape in shapes.items()}, {}) as writer:
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            writer.write(name, drawn.repeat(-(-count // len(drawn)))[:count].view(shape))
    aside.rename(file)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def load(sizes: str, transformer: str, kind: str) -> None:
    """Load a base in this process, and print memory, bytes stored, weights, and memory before."""
    import torch

    from difftrain.device import quantised
    from difftrain.models.registry import make_family

    torch.set_num_threads(1)
    family: Any = make_family(config(kind, precision="bf16", init_from_config=sizes, transformer=transformer))
    family.load(meta=True)
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    root = family.load(deferred=[part for part in family.parts if part not in family.in_root]).root
    done.set()
    thread.join()
    tensors = [
        *root.parameters(),
        *(buffer for layer in quantised.layers_of(root) for buffer in layer.buffers(recurse=False)),
    ]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    print(json.dumps([max(peak, anonymous()), stored, quantised.count_parameters(root), before]))


def anonymous() -> int:
    """Return the bytes of this process that are no pages of files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
