"""Memory that runs out becomes one sentence: who, doing what, with how much in use, and flags that need less."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from refusals import names

from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import DatasetSection, EvalSection, EvalSetSection
from difftrain.contracts import Batch, Bucket, TrainingFault
from difftrain.device import Device
from difftrain.device.memory import during
from difftrain.distributed.launch import Launch
from difftrain.train.diagnosis.out_of_memory import CACHING, EVALUATING, SAMPLING, explained, in_step, remedies

FILES = Path(__file__).parents[1] / "files"
ALONE, THIRD = Launch(), Launch(2, 4, 2, 4, "localhost", 1)
ERROR = torch.OutOfMemoryError((FILES / "torch_npu_out_of_memory.txt").read_text())
WORDS = ["--init_from_config=tiny", "--train_data_dir=.", "--output_dir=out", "--resolution=64"]


def config(*flags: str):
    return parse([*WORDS, *flags]).config


class Fake(Device):
    """A device whose memory can be asked for."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.torch_device = torch.device("meta")

    def memory(self):
        from difftrain.device.memory import Memory

        return Memory(61.0, 0.5, 57.0, 59.0, 58.5)


def micro() -> list[Batch]:
    ids = torch.arange(4)
    return [Batch(Bucket(1024, 768), ids, ids, {}, {})]


def test_a_step_names_its_shape_its_rank_and_the_memory() -> None:
    cfg = config("--train_batch_size=4")
    with pytest.raises(TrainingFault) as caught, explained(cfg, Fake(), THIRD), in_step(13, micro()):
        raise ERROR
    text = str(caught.value)
    assert re.match(
        rf"rank 2: meta .* training \(step 13, 4 images of {re.escape(str(Bucket(1024, 768)))}\), 2\.00 GiB more .*"
        r"\(61\.00 GiB in all, 57\.00 in use .* \(at most 58\.50\), ",
        text,
    )
    assert "--train_batch_size=2 --gradient_accumulation_steps=2 " in text
    assert names(text, "--resume=FOLDER") and caught.value.exit_code == 1


def test_only_what_is_not_in_use_yet_is_offered() -> None:
    first = remedies(config("--train_batch_size=4"), THIRD, "training")
    assert first[0] == "--gradient_checkpointing" and any(way.startswith("--cache_latents ") for way in first)
    assert any(way.startswith("--optimizer_type=oss") for way in first)
    done = config("--train_batch_size=1", "--gradient_checkpointing", "--cpu_offload_checkpointing", "--full_bf16",
                  "--mixed_precision=bf16", "--cache_latents", "--cache_text_encoder_outputs",
                  "--optimizer_type=Adafactor", "--fused_backward_pass")  # fmt: skip
    assert remedies(done, ALONE, "training") == ["a smaller --resolution"]


@pytest.mark.parametrize("doing", ["training", SAMPLING, CACHING])
@pytest.mark.parametrize("launch", [ALONE, THIRD])
def test_every_remedy_is_a_flag_that_parses(doing: str, launch: Launch) -> None:
    for way in remedies(config("--train_batch_size=3"), launch, doing):
        words = [word for word in shlex.split(way.partition(" (")[0]) if word.startswith("--")]
        offered = [word for word in words if word not in ("--resolution", "--sample_prompts")]
        config("--train_batch_size=3", *offered)


def test_caching_has_a_batch_size_of_its_own() -> None:
    assert remedies(config("--vae_batch_size=8"), ALONE, CACHING) == ["--vae_batch_size=4"]
    assert remedies(config("--train_batch_size=1"), ALONE, CACHING) == ["a smaller --resolution"]
    both = config("--vae_batch_size=8", "--cache_text_encoder_outputs", "--cache_batch_size=12")
    assert remedies(both, ALONE, CACHING) == ["--vae_batch_size=4", "--cache_batch_size=6"]


def test_evaluation_sets_have_a_batch_size_of_their_own() -> None:
    cfg = config("--train_batch_size=1")
    held = EvalSetSection(name="held", config="held.toml", datasets=(DatasetSection(batch_size=6),))
    for batch_size, half in ((None, 3), (4, 2)):
        asked = cfg.model_copy(update={"eval": EvalSection(sets=(held,), batch_size=batch_size)})
        assert any(way.startswith(f"--eval.batch_size={half} (") for way in remedies(asked, ALONE, EVALUATING))
        assert not any("eval" in way for way in remedies(asked, ALONE, "training"))
    assert not any("eval" in way for way in remedies(cfg, ALONE, EVALUATING))


def test_the_host_has_other_remedies() -> None:
    cfg = config("--max_data_loader_n_workers=8", "--cpu_offload_checkpointing", "--gradient_checkpointing",
                 "--cache_latents_to_disk", "--cache_preload")  # fmt: skip
    with pytest.raises(TrainingFault) as caught, explained(cfg, Device("cpu"), ALONE), during("reading"):
        raise MemoryError
    text = str(caught.value)
    assert text.startswith("this machine ") and names(text, "reading")
    assert "--max_data_loader_n_workers=4" in text and "without --cpu_offload_checkpointing" in text
    assert "without --cache_preload" in text
    assert "--train_batch_size" not in text


def test_before_training_and_other_errors() -> None:
    with (
        pytest.raises(TrainingFault, match=r"while setting up .*optimizer"),
        explained(config(), Fake(), ALONE),
    ):
        raise ERROR
    with pytest.raises(RuntimeError, match="shapes"), explained(config(), Fake(), ALONE):
        raise RuntimeError("shapes")
