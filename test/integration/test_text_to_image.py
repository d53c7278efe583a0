"""train_text_to_image.py against the arithmetic of diffusers' example, written out here, and started as its users start it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.training_utils import EMAModel
from doors import Door, losses, metrics
from hub_stub import serving
from safetensors.torch import load_file
from torch import Tensor

from difftrain.config import TrainConfig
from difftrain.config.parse_text_to_image import parse
from difftrain.contracts import Batch
from difftrain.data.loader import make_loader
from difftrain.data.prepare import prepare
from difftrain.models.registry import make_family
from difftrain.models.weights.identify import identify
from difftrain.train.session import open_run_data, plan_run

DOOR = Path(__file__).resolve().parents[2] / "sd_scripts_xl" / "train_text_to_image.py"
CASES = {
    "plain": ("--learning_rate=1e-3", "--adam_weight_decay=0.1"),
    "ema_snr_velocity": (
        "--use_ema", "--snr_gamma=5", "--prediction_type=v_prediction", "--gradient_accumulation_steps=2",
        "--input_perturbation=0.1", "--learning_rate=1e-3", "--random_flip",
    ),
}  # fmt: skip


class ExampleDoor(Door):
    """The same door object on another script."""

    def words(self, out: Path, *flags: str, steps: int = 4) -> list[str]:
        """Return a command line on the tiny model."""
        return [
            sys.executable, str(DOOR), "--init_from_config=tiny", f"--train_data_dir={self.data}", f"--output_dir={out}",
            "--resolution=64", "--train_batch_size=2", f"--max_train_steps={steps}", "--seed=1", *flags,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def imagefolder(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures with a metadata.jsonl beside them in place of caption files; every third has several captions."""
    folder = tmp_path_factory.mktemp("imagefolder")
    rows = []
    for path in sorted(pictures.glob("*.png")):
        (folder / path.name).write_bytes(path.read_bytes())
        text: Any = path.with_suffix(".txt").read_text()
        rows.append({"file_name": path.name, "text": [text, f"{text} again"] if len(rows) % 3 == 0 else text})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def example(imagefolder: Path, tmp_path_factory: pytest.TempPathFactory) -> ExampleDoor:
    return ExampleDoor(imagefolder, tmp_path_factory.mktemp("cache"))


# ------------------------------------------------------------------ the example's arithmetic


def steps_of(cfg: TrainConfig) -> tuple[Any, Any, Iterator[list[Batch]]]:
    """Return family, parts as they begin, and the micro batches of every step, with our draws."""
    family = make_family(cfg)
    data = open_run_data(cfg, prepare(cfg, log=lambda text: None), family)
    parts = family.load()
    plan, total = plan_run(cfg, data, 1)
    loader = make_loader(
        data, plan, family.features, family.tokenizer(parts), cfg, dp_rank=0, dp_size=1, first_step=0, last_step=total
    )
    return family, parts, iter(loader)


def as_the_example(cfg: TrainConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Train as diffusers' loop does, on our latents, noise, timesteps and captions: losses, and the weights it saves."""
    family, parts, steps = steps_of(cfg)
    unet, encoder = copy.deepcopy(parts.root.unet).train(), parts.frozen["text_encoder"]
    scheduler = DDPMScheduler(
        num_train_timesteps=1000, beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
        prediction_type=cfg.model.prediction_type,
    )  # fmt: skip
    decay = 0.1 if "weight_decay=0.1" in cfg.optimizer.args else 1e-2
    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=cfg.optimizer.learning_rate, betas=(0.9, 0.999), weight_decay=decay, eps=1e-8
    )
    ema = EMAModel(unet.parameters()) if cfg.ema.enable else None
    velocity, gamma = cfg.model.prediction_type == "v_prediction", cfg.loss.min_snr_gamma
    found = []
    for micro_batches in steps:
        step_loss = 0.0
        for batch in micro_batches:
            # --- noise, its input, and what is to be predicted
            latents, noise, t = (
                family.latents(batch, parts),
                batch.draws["noise"].float(),
                batch.draws["timestep"].long(),
            )
            entering = noise + cfg.noise.ip_gamma * batch.draws["ip_noise"] if cfg.noise.ip_gamma else noise
            target = scheduler.get_velocity(latents, noise, t) if velocity else noise
            with torch.no_grad():
                states = encoder(batch.features["input_ids_1"].reshape(len(t), -1))[0]
            output = unet(scheduler.add_noise(latents, entering, t), t, states).sample

            # --- the mean squared error, or each sample's by its signal-to-noise ratio
            error = (output.float() - target.float()).square()
            if gamma:
                kept = scheduler.alphas_cumprod[t]
                snr = kept / (1 - kept) + (1 if velocity else 0)
                error = error.mean(dim=[1, 2, 3]) * (torch.clamp(snr, max=gamma) / snr)
            loss = error.mean()
            (loss / len(micro_batches)).backward()
            step_loss += float(loss.detach()) / len(micro_batches)

        # --- the update
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.step(unet.parameters())
        found.append(step_loss)
    if ema is not None:
        ema.copy_to(unet.parameters())
    return found, {name: value.detach() for name, value in unet.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_ten_losses_and_the_weights_are_the_examples(
    case: str, example: ExampleDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = example.words(tmp_path / "out", *CASES[case], steps=10)
    example.run_words(words)
    monkeypatch.setenv("XDG_CACHE_HOME", example.env["XDG_CACHE_HOME"])
    cfg = parse(words[2:], identify).config
    expected, weights = as_the_example(cfg)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=2e-5)
    saved = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == weights.keys()
    # against how far training has moved them: where a gradient is all but zero AdamW makes a step of its rounding
    start = make_family(cfg).load().root.unet.state_dict()
    moved = sum(float((weights[name] - start[name]).square().sum()) for name in weights) ** 0.5
    apart = sum(float((weights[name] - saved[name]).square().sum()) for name in weights) ** 0.5
    assert moved > 0.1 and apart < 1e-3 * moved


# ------------------------------------------------------------------ a run, from its start to its pipeline


def test_a_run_is_gone_on_with_and_ends_in_a_pipeline(example: ExampleDoor, tmp_path: Path) -> None:
    flags = ("--checkpointing_steps=1", "--checkpoints_total_limit=2", "--use_ema", "--max_train_samples=6")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    more = ("--validation_prompts", "a cat", "a dog", "--timed_step=3", "--loss_target=9")
    example.run_words(example.words(straight, *flags, *more, steps=4))
    assert sorted(path.name for path in straight.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert len(list((straight / "sample").glob("*.png"))) >= 2
    report = json.loads((straight / "report.json").read_text())
    times = {line["step"]: line["step_s"] for line in metrics(straight)}
    assert report["timed_step_s"] == times[3] and report["timed_step_ips"] == pytest.approx(2 / times[3])
    assert report["all_steps_loss_mean"] == pytest.approx(sum(losses(straight)) / 4)
    assert [(target["met"], target["target"]) for target in report["targets"]] == [(True, "<= 9")]
    assert report["dataset"]["count"] == 10 and report["dataset"]["draws_per_epoch"] == 6

    # the same in two parts: with the flags of a longer run the second goes on
    example.run_words(example.words(broken, *flags, steps=2))
    text = example.run_words(example.words(broken, *flags, "--resume_from_checkpoint=latest", steps=4))
    assert losses(broken) == losses(straight) and "checkpoint-2" in text
    name = "unet/diffusion_pytorch_model.safetensors"
    one, two = load_file(straight / name), load_file(broken / name)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not list(broken.glob(".*.tmp"))

    # without being asked to go on a folder with a run is not written over
    refused = example.run_words(example.words(broken, *flags, steps=4), expect=2)
    assert "--output_dir" in refused

    # what lies at the top is what diffusers reads
    pipeline = StableDiffusionPipeline.from_pretrained(straight, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    assert torch.equal(pipeline.unet.state_dict()["conv_in.weight"], one["conv_in.weight"])
    drawn = pipeline("a cat", num_inference_steps=1, height=64, width=64, output_type="np").images
    assert drawn.shape == (1, 64, 64, 3)


def test_it_goes_on_from_its_own_pipeline_under_accelerate(example: ExampleDoor, tmp_path: Path) -> None:
    """What a run has written is what another begins with; accelerate's file says precision and processor."""
    first = tmp_path / "first"
    example.run_words(example.words(first, "--prediction_type=v_prediction", steps=1))
    config = tmp_path / "default_config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 1\nuse_cpu: true\n"
    )
    out = tmp_path / "out"
    words = [word for word in example.words(out, steps=2)[1:] if word != "--init_from_config=tiny"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={config}"]
    example.run_words([*launch, *words, f"--pretrained_model_name_or_path={first}"])
    report = json.loads((out / "report.json").read_text())
    assert report["precision"] == "bf16" and report["device"]["kind"] == "cpu"
    assert (
        report["config"]["model"]["family"] == "sd1" and report["config"]["model"]["prediction_type"] == "v_prediction"
    )


def test_two_processes_under_torchrun_take_the_same_step(example: ExampleDoor, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    example.run_words(example.words(one, "--gradient_accumulation_steps=2", steps=2))
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    example.run_words([*run, *endpoint, *example.words(two, steps=2)[1:]])
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert json.loads((two / "report.json").read_text())["world_size"] == 2


def test_a_run_from_a_hub_and_to_a_hub(example: ExampleDoor, imagefolder: Path, tmp_path: Path) -> None:
    first, out = tmp_path / "first", tmp_path / "out"
    example.run_words(example.words(first, steps=1))
    with serving() as hub:
        parts = ("model_index.json", "unet", "vae", "text_encoder", "tokenizer", "scheduler")
        own = [path for path in first.rglob("*") if path.is_file() and path.relative_to(first).parts[0] in parts]
        hub.repo("acme/tiny").push({path.relative_to(first).as_posix(): path.read_bytes() for path in own})
        data = {f"small/train/{path.name}": path.read_bytes() for path in imagefolder.iterdir()}
        hub.repo("acme/pictures", "dataset").push(
            {**data, "small/test/0.png": b"x", "small/test/metadata.jsonl": b"{}"}
        )
        words = [
            word for word in example.words(out, steps=1) if not word.startswith(("--init_from", "--train_data_dir"))
        ]
        ids = ("--pretrained_model_name_or_path=acme/tiny", "--revision=main", "--dataset_name=acme/pictures")
        more = ("--dataset_config_name=small", "--push_to_hub", "--hub_model_id=ann/tuned", f"--hub_token={hub.token}")
        env = hub.environment(tmp_path / "home")
        del env["HF_TOKEN"]
        printed = example.run_words([*words, *ids, *more], **env)
        sent = hub.repo("ann/tuned").files
    report = json.loads((out / "report.json").read_text())
    assert report["config"]["model"]["family"] == "sd1" and report["dataset"]["count"] == 10, report["dataset"]
    assert sent["model_index.json"] == (out / "model_index.json").read_bytes()
    assert (
        sent["unet/diffusion_pytorch_model.safetensors"]
        == (out / "unet/diffusion_pytorch_model.safetensors").read_bytes()
    )
    assert {name.split("/")[0] for name in sent} <= {path.name for path in first.iterdir()} - {"logs", "metrics.jsonl"}
    assert hub.token not in printed
