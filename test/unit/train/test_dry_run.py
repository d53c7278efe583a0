"""--dry_run: the figures of the run that it stands for, and nothing but the index is written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from PIL import Image
from refusals import names

from difftrain.config.parse_flags import parse
from difftrain.config.toml import load
from difftrain.contracts import Bucket, ConfigFault
from difftrain.device import choice
from difftrain.models.registry import make_family
from difftrain.models.step_memory import step_peaks
from difftrain.train.estimate import footprint
from difftrain.train.estimate.dry_run import dry_run, scaled, time_line
from difftrain.train.estimate.footprint import needs, state_bytes

ROOT = Path(__file__).parents[3]
STEP = 3 << 30


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the contract line over ten pictures: eight square, two wide."""
    data = tmp_path / "data"
    data.mkdir()
    for i in range(10):
        Image.new("RGB", (64, 64) if i < 8 else (128, 32), (20 * i, 90, 200)).save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(f"picture {i}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        footprint, "step_peaks", lambda *_: (STEP, STEP)
    )  # what it finds: test/unit/models/test_step_memory.py
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return [
        "--init_from_config=tiny", f"--train_data_dir={data}", f"--output_dir={tmp_path / 'out'}", "--output_name=NAME",
        "--resolution=64,64", "--enable_bucket", "--min_bucket_reso=32", "--max_bucket_reso=128",
        "--train_batch_size=2", "--max_train_steps=12", "--learning_rate=1e-4",
    ]  # fmt: skip


def described(line: list[str], *, full: bool = True) -> str:
    """Return what a dry run in this process says."""
    said: list[str] = []
    assert dry_run(parse(line).config, said.append, full=full) == 0
    return "\n".join(said)


@pytest.mark.flags("dry_run")
def test_configuration_and_arithmetic(line: list[str], tmp_path: Path) -> None:
    text = described([*line, "--seed=1", "--gradient_accumulation_steps=3"])
    toml = text[text.index("[model]") :].partition("10 samples")[0]
    (tmp_path / "said.toml").write_text(toml)
    assert load(tmp_path / "said.toml") == parse([*line, "--seed=1", "--gradient_accumulation_steps=3"]).config
    assert tomllib.loads(toml)["training"]["accumulation"] == 3
    assert re.search("batch: 2 images .* x 3 accumulated x 1 rank = 6 images ", text)
    # buckets of 8 and 2 uses are 4 + 1 micro batches, of which a step takes 3: 2 steps an epoch
    assert re.search("length: 12 steps in 6 epochs .*--max_train_steps.* 60 images", text)
    # whole batches of 6: 12 steps need floor(8e/6) + floor(2e/6) >= 12, so 8 epochs
    text = described([*line, "--seed=1", "--gradient_accumulation_steps=3", "--epoch_batches=whole"])
    assert "length: 12 steps in 8 epochs (by --max_train_steps), 72 images seen" in text
    assert re.search("bucket 32x128 has 2 draws .*global batch 6", text) or "128x32" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.flags("dry_run")
def test_ten_lines_say_whether_it_fits(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text('{"fps": 2.0, "steps": 12, "world_size": 1}')
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 4000, 24564\necho 5000, 24564\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    ten = [*line, "--save_every_n_steps=4", "--save_state"]
    said = described(ten, full=False).splitlines()
    assert [each.partition(":")[0] for each in said] == [
        "model", "data", "steps", "batch", "memory", "free", "disk", "output folder", "time", "dry run",
    ]  # fmt: skip
    values = {name: text for name, _, text in (each.partition(": ") for each in said)}
    assert values["steps"].startswith("12 in ") and values["data"].startswith("10 ")
    assert values["free"].startswith("3.906 of 23.99 GiB on 2 cuda devices") and " not " in values["free"]
    assert re.search("4 exports .* 4 checkpoints", values["disk"])
    assert values["time"].startswith("12 s at 2 ")  # 24 images
    assert described([*ten, "--device=cpu"], full=False).splitlines()[5].endswith(" fits")

    # --- the smallest model is no row of zeros, and one is one
    numbers = re.findall(r"([\d.]+) (GiB|MiB)", values["memory"] + values["disk"])
    assert numbers and all(float(number) >= 0.1 or unit == "MiB" for number, unit in numbers)
    assert " images" not in described([*ten, "--train_batch_size=1"], full=False).splitlines()[3]
    assert not re.search(r"(?<![\d.])0\.0\d* GiB", described(ten))


def test_time_is_known_of_a_run_on_as_many_devices(line: list[str], tmp_path: Path) -> None:
    cfg = parse(line).config
    assert time_line(cfg, 24, 1).startswith("not known")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text('{"fps": 4.0, "steps": 12, "world_size": 2}')
    assert time_line(cfg, 24, 1).startswith("not known") and time_line(cfg, 24, 2).startswith("6 s")


def test_epochs_win(line: list[str]) -> None:
    assert "length: 15 steps in 3 epochs (by --max_train_epochs=3), 30 images seen" in described(
        [*line, "--max_train_epochs=3"]
    )


def test_it_speaks_for_as_many_ranks_as_the_launch_has(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    text = described([*line, "--optimizer_type=oss"])
    assert "x 4 ranks = 8 images " in text
    assert "sharded over 4 ranks" in text and "gradient buckets" in text
    assert "gradient buckets" not in described([*line, "--ddp_gradient_as_bucket_view"])


def test_counts_are_those_of_the_built_model(line: list[str]) -> None:
    text = described([*line, "--train_text_encoder", "--learning_rate_te2=0"])
    parts = make_family(parse([*line, "--train_text_encoder", "--learning_rate_te2=0"]).config).load()
    trained = sum(p.numel() for p in parts.root.parameters() if p.requires_grad)
    every = sum(p.numel() for p in parts.root.parameters())
    every += sum(p.numel() for part in parts.frozen.values() for p in part.parameters())
    assert f" in all: {every:,}, {trained:,} trained" in text
    assert re.search(r"parameters of text_encoder_2: [\d,]+, frozen", text)


def test_memory_is_that_of_the_built_model(line: list[str]) -> None:
    cfg = parse([*line, "--mixed_precision=bf16", "--use_ema"]).config
    family = make_family(cfg)
    found = {need.what: need.size for need in needs(cfg, family.load(meta=True), ranks=1)}
    built = family.load()
    moving = sum(p.numel() for p in built.root.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for part in built.frozen.values() for p in part.parameters())
    casts = [name for name in found if "autocast" in name]
    assert [found.pop(name) for name in casts] == [2 * moving]
    assert found == {
        "weights in fp32": 4 * moving,
        "frozen weights": frozen,
        "gradients": 4 * moving,
        "optimizer state": 8 * moving,
        "averaged weights": 4 * moving,
    }


@pytest.mark.parametrize(
    ("flags", "bytes_each"),
    [
        ("", (2, 2, 2, 8)),
        ("--master_weights=fp32", (2, 4, 2, 8)),
        ("--master_weights=stochastic", (2, 0, 2, 8)),
        ("--master_weights=none", (2, 0, 2, 4)),
    ],
)
def test_memory_of_half_weights(line: list[str], flags: str, bytes_each: tuple[int, ...]) -> None:
    cfg = parse([*line, "--mixed_precision=bf16", "--full_bf16", *flags.split()]).config
    family = make_family(cfg)
    parts = family.load(meta=True)
    found = {need.what.split(" (")[0]: need.size for need in needs(cfg, parts, ranks=1)}
    moving = sum(p.numel() for p in parts.root.parameters() if p.requires_grad)
    names = ("weights in bf16", "master weights", "gradients", "optimizer state")
    assert tuple(found.get(name, 0) / moving for name in names) == bytes_each
    assert not any("autocast" in name for name in found)


@pytest.mark.flags("fused_backward_pass", "fused_optimizer_groups")
def test_memory_of_gradients_that_are_freed_at_once(line: list[str]) -> None:
    def gradients(*flags: str) -> float:
        cfg = parse([*line, *flags]).config
        return next(n.size for n in needs(cfg, make_family(cfg).load(meta=True), 1) if n.what == "gradients")

    parameters = list(make_family(parse(line).config).load(meta=True).root.parameters())
    assert gradients("--fused_backward_pass") == 4 * max(p.numel() for p in parameters)
    assert gradients("--fused_optimizer_groups=1") == gradients() == 4 * sum(p.numel() for p in parameters)
    assert gradients("--fused_backward_pass") < gradients("--fused_optimizer_groups=10") < gradients() / 2


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--optimizer_type=AdamW", 8),
        ("--optimizer_type=oss", 8),
        ("--optimizer_type=torch.optim.SGD", 0),
        ("--optimizer_type=torch.optim.SGD --optimizer_args momentum=0.9", 4),
        ("--optimizer_type=AdamW --optimizer_args amsgrad=True", 12),
    ],
)
def test_state_of_an_optimizer_is_counted(line: list[str], flags: str, size: float) -> None:
    assert state_bytes(parse([*line, *flags.split()]).config) == size


@pytest.mark.flags("engine", "shard_size", "fsdp_reduce")
def test_fsdp_divides_weights_gradients_state_and_averages(line: list[str]) -> None:
    def found(*flags: str, ranks: int = 4) -> dict[str, float]:
        cfg = parse([*line, "--use_ema", *flags]).config
        return {need.what: need.size for need in needs(cfg, make_family(cfg).load(meta=True), ranks)}

    alone, four = found(ranks=1), found("--engine=fsdp")
    shared = {"weights in fp32", "gradients", "optimizer state", "averaged weights"}
    assert four.keys() == alone.keys() and shared < four.keys()  # no buckets of DistributedDataParallel
    for what, size in four.items():
        assert size == pytest.approx(alone[what] / (4 if what in shared else 1)), what
    assert found("--engine=fsdp", "--shard_size=2")["optimizer state"] == alone["optimizer state"] / 2
    accumulated = ("--engine=fsdp", "--gradient_accumulation_steps=2")
    assert found(*accumulated)["gradients"] == alone["gradients"]  # whole until the last micro batch
    assert found(*accumulated, "--fsdp_reduce=each")["gradients"] == four["gradients"]


@pytest.mark.parametrize("flags", [
    (), *(pytest.param(one, marks=pytest.mark.nightly)
          for one in (("--mixed_precision=bf16",), ("--gradient_accumulation_steps=2",))),
])  # fmt: skip
def test_a_step_of_fsdp_takes_less_than_one_of_ddp(
    line: list[str], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "step_peaks", step_peaks)

    def step(*more: str) -> int:
        cfg = parse([*line, *flags, *more]).config
        family = make_family(cfg)
        return footprint.device_memory(cfg, family, family.load(meta=True), 4, Bucket(64, 64), 1).step

    fsdp = ("--engine=fsdp", *(("--fsdp_reduce=each",) if "--gradient_accumulation_steps=2" in flags else ()))
    assert 0 < step(*fsdp) < step()


def test_flops_are_the_familys(line: list[str]) -> None:
    from difftrain.contracts import Bucket

    text = described(line)
    family = make_family(parse(line).config)
    parts = family.load(meta=True)
    assert f"at 64x64: {scaled(family.flops_per_sample(parts, Bucket(64, 64)))}," in text


def test_scaled() -> None:
    assert [scaled(value) for value in (0, 7, 1500, 20.24e12, 3e33)] == ["0", "7", "1.5 k", "20.24 T", "3e+09 Y"]


def test_no_device_is_looked_for(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("a dry run looked for a device")

    for name in ("find", "choose", "load_npu"):
        monkeypatch.setattr(choice, name, forbidden)
    assert "dry run: " in described(line)


def test_what_would_stop_the_run_stops_the_dry_run(line: list[str], tmp_path: Path) -> None:
    line = [word for word in line if not word.startswith("--init_from_config")]
    with pytest.raises(ConfigFault, match="--tokenizer1_path"):
        described([*line, "--init_from_config=base", f"--tokenizer1_path={tmp_path}", f"--tokenizer2_path={tmp_path}"])


def test_what_is_on_a_hub_is_named_and_not_fetched(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    line = [word for word in line if not word.startswith("--init_from_config")]
    said = described([*line, "--init_from_config=base"])
    assert "for --tokenizer1_path: model openai/clip-vit-large-patch14, from http://127.0.0.1:9" in said
    assert names(said, "unet: 2,567,463,684")  # figures that need no tokenizer
    cached = described([*line, "--init_from_config=base", "--cache_latents", "--cache_text_encoder_outputs"])
    # the encoders are as good as gone, and how large their caches are is not known before captions are tokens
    assert "frozen weights 0 GiB" in cached and "frozen weights 0 GiB" not in said
    assert "--tokenizer2_path" in cached.partition("cache: ")[2]
    said = described([*line, "--pretrained_model_name_or_path=acme/sdxl"])
    assert "for --pretrained_model_name_or_path: model acme/sdxl" in said
    assert "dry run: " in said and "parameters" not in said
    with pytest.raises(ConfigFault, match="--optimizer_args") as caught:
        described([*line, "--pretrained_model_name_or_path=acme/sdxl", "--optimizer_args", "nothing=1"])
    assert "acme/sdxl" not in str(caught.value) and not (tmp_path / "hub").exists()


@pytest.mark.flags("cache_latents", "cache_text_encoder_outputs_to_disk")
def test_caches_are_counted_and_what_they_replace_leaves_the_card(line: list[str]) -> None:
    text = described([*line, "--cache_latents", "--cache_text_encoder_outputs_to_disk"])
    each = 2 * 16 * 8 * 8 * 4 // 1024  # mean and deviation, channels, cells, fp32: the same in both buckets
    sizes = r" [\d.]+ KiB .*\({}\), [\d.]+ KiB "
    assert re.search(rf"latents: 10 .*{sizes.format(f'moments {each} KiB in float32')}.*memory", text)
    for encoder in ("text_encoder_1", "text_encoder_2"):  # a caption each, and the empty one
        assert re.search(rf"{encoder}: 11 .*{sizes.format('hidden_[12] .*')}.*disk", text)
    assert "frozen weights 0 GiB" in text and "frozen weights 0 GiB" not in described(line)


@pytest.mark.flags("dry_run_ranks")
def test_scaling_is_said_for_any_number_of_ranks(line: list[str]) -> None:
    said: list[str] = []
    dry_run(parse([*line, "--gradient_accumulation_steps=3"]).config, said.append, for_ranks="8,1024")
    lines = [each for each in said if each.startswith("scaling")]
    assert [each.split(":")[1].strip() for each in lines[:3]] == ["1 rank", "8 ranks", "1,024 ranks"]
    model = sum(p.numel() for p in make_family(parse(line).config).load(meta=True).root.unet.parameters())
    sent = {1: 0.0, 8: 2 * 7 / 8 * 4 * model, 1024: 2 * 1023 / 1024 * 4 * model}
    for text, (count, size) in zip(lines, sent.items(), strict=False):
        assert names(text, f"{2 * 3 * count:,}")
        if size:
            assert names(text, f"sends {footprint.gib_text(size)}", f"all-reduce {footprint.gib_text(size)}")
    assert names(lines[3], "TFLOP/s", "8 devices", "20 GB/s")


@pytest.mark.parametrize("counts", ["eight", "8,-1", "8;64", "0"])
def test_numbers_of_ranks_that_make_no_sense(line: list[str], counts: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        dry_run(parse(line).config, lambda text: None, for_ranks=counts)
    (fault,) = caught.value.faults
    assert fault.where == "--dry_run_ranks" and names(fault.what, repr(counts))


def test_one_rank_says_nothing_of_scaling_unless_asked(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "scaling" not in described(line, full=False) and "scaling: 1 rank" in described(line)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "scaling: 4 ranks" in described(line, full=False)


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        ("--optimizer_type=oss", {"optimizer state": 8}),
        ("--deepspeed --zero_stage=1", {"optimizer state": 8}),
        ("--deepspeed --zero_stage=2", {"optimizer state": 8, "gradients": 8}),
        ("--deepspeed --zero_stage=3", {"optimizer state": 8, "gradients": 8, "weights in fp32": 8}),
    ],
)
def test_sharding_leaves_each_rank_its_part(line: list[str], flags: str, shares: dict[str, int]) -> None:
    cfg = parse([*line, *flags.split()]).config
    parts = make_family(cfg).load(meta=True)
    one, eight = ({item.what: item for item in needs(cfg, parts, ranks)} for ranks in (1, 8))
    for what, item in one.items():
        assert eight[what].size == pytest.approx(item.size / shares.get(what, 1)), what
        assert ("8 ranks" in eight[what].formula) == (what in shares)


def test_deepspeed_keeps_half_weights_and_shares_the_fp32_ones(line: list[str]) -> None:
    cfg = parse([*line, "--deepspeed", "--zero_stage=2", "--mixed_precision=bf16"]).config
    parts = make_family(cfg).load(meta=True)
    moving = footprint.trained(parts.root)
    found = {item.what: item.size for item in needs(cfg, parts, 4)}
    assert found["weights in bf16"] == 2 * moving and found["gradients"] == 2 * moving / 4
    assert found["master weights (fp32)"] == 4 * moving / 4 and not any("casts" in what for what in found)


def test_a_pipeline_sends_over_its_cuts_and_holds_its_stage(line: list[str]) -> None:
    cfg = parse([*line, "--pipeline_stages=2", "--gradient_accumulation_steps=4"]).config
    said: list[str] = []
    dry_run(cfg, said.append, for_ranks="2,3,8")
    lines = {each.split(":")[1].split(" rank")[0].strip(): each for each in said if each.startswith("scaling:")}
    assert names(lines["3"], "--pipeline_stages=2")
    assert (
        "MiB" in lines["8"] and names(lines["8"], "32") and names(lines["2"], "8")
    )  # images: of four replicas, and of one
    parts = make_family(cfg).load(meta=True)
    one, two = ({item.what: item.size for item in needs(c, parts, 2)} for c in (parse(line).config, cfg))
    assert two["weights in fp32"] == one["weights in fp32"] / 2 and two["optimizer state"] == one["optimizer state"] / 2


def test_a_pipeline_takes_what_its_largest_stage_and_its_schedule_do(line: list[str]) -> None:
    """A cut behind the first block leaves the second stage almost all; GPipe keeps the activations of all micro batches."""

    def memory(*flags: str) -> footprint.DeviceMemory:
        cfg = parse([*line, "--pipeline_stages=2", "--gradient_accumulation_steps=4", *flags]).config
        family = make_family(cfg)
        return footprint.device_memory(cfg, family, family.load(meta=True), 2, Bucket(64, 64), 8)

    even, uneven, gpipe = (
        memory(),
        memory("--partition_method=manual", "--partition_split=2"),
        memory("--pipeline_schedule=gpipe"),
    )
    weights = [{item.what: item.size for item in each.items}["weights in fp32"] for each in (even, uneven, gpipe)]
    assert weights[1] > 1.2 * weights[0] and weights[0] == weights[2]
    gradients = {item.what: item.size for item in even.items}["gradients"]
    assert gpipe.step - gradients == pytest.approx(2 * (even.step - gradients), rel=0.01)  # four micro batches for two


def test_the_memory_of_a_device_decides(line: list[str]) -> None:
    text = described([*line, "--memory_gib=100"], full=False)
    assert re.search(r"^fit: a device of 100 GiB: fits", text, re.MULTILINE)
    said: list[str] = []
    with pytest.raises(ConfigFault) as caught:
        dry_run(parse([*line, "--memory_gib=2"]).config, said.append)
    [fault] = caught.value.faults
    assert names(fault, "--memory_gib", 2, "--cache_latents_to_disk", "--gradient_checkpointing")
    assert any(text.startswith("fit: a device of 2 GiB") for text in said)  # with all other lines before
