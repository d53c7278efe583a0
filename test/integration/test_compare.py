"""difftrain compare on runs of the tiny SD3: alike where they should be, and four faults that are planted, each found at its step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from difftrain.cli import main

STEPS = 10
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Return a function that trains in this process and returns the run's folder."""
    from difftrain.config.parse_keys import parse
    from difftrain.train import finalize
    from difftrain.train.run import run
    from difftrain.train.run_dir import run_dirs

    base, threads = tmp_path_factory.mktemp("compared"), torch.get_num_threads()
    dataset, recipe = base / "pictures.toml", base / "recipe.toml"
    dataset.write_text(f"resolutions = [64]\n[[directory]]\npath = '{pictures}'\n")
    recipe.write_text(
        f"""train_type = "sd3_light_pretrain"
        [output]
        dataset = '{dataset}'
        [model]
        type = "sd3"
        init_from_config = "tiny"
        num_layers = 3
        t5_max_length = 32
        [training]
        micro_batch_size_per_gpu = 2
        seed = 1
        epochs = 100
        max_steps = {STEPS}
        device = "cpu"
        [optimizer]
        type = "adamw"
        lr = 1e-4
        [save]
        save_every_n_epochs = 100
        [data]
        num_dataloader_workers = 0
        [cache]
        latents_to_disk = false
        text_to_disk = false
        [monitoring]
        logging_steps = 1
        """
    )

    def trained(name: str, *flags: str) -> Path:
        argv = [f"--config={recipe}", f"--output.output_dir={base / name}", *flags]
        assert run(parse(argv).config, argv) == 0
        return run_dirs(base / name)[0]

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        patch.setattr(finalize, "measure_matmul", lambda *_, **__: 1e12)  # seconds of no interest here
        yield trained
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def right(train: Train) -> Path:
    return train("right")


def compared(a: Path, b: Path, folder: Path, code: int) -> dict[str, Any]:
    """Compare two runs, and return what is said of the second."""
    assert main(["compare", str(a), str(b), f"--json={folder / 'found.json'}"]) == code
    (found,) = json.loads((folder / "found.json").read_text())["comparisons"]
    return found


def wrong_gelu(patch: pytest.MonkeyPatch) -> None:
    """Let the feed-forward layers take the quick form, x sigmoid(1.702 x), where the model was made with tanh."""
    patch.setattr(F, "gelu", lambda x, approximate="none": x * torch.sigmoid(1.702 * x))


def inverted_mask(patch: pytest.MonkeyPatch) -> None:
    """Let attention see what it should not, and nothing else."""
    from difftrain.device import attend

    unfused = attend.unfused

    def wrong(q: Any, k: Any, v: Any, mask: Any, causal: bool, *rest: Any, **more: Any) -> Any:
        if causal:  # as CLIP's is
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().logical_not()
        return unfused(q, k, v, mask, False, *rest, **more)

    patch.setattr(attend, "unfused", wrong)


def dropped_scale(patch: pytest.MonkeyPatch) -> None:
    """Let gradients be sums over the samples of a step, where they should be means."""
    from difftrain.engine.update import LossTerms

    patch.setattr(LossTerms, "loss", lambda self, terms, counts: sum(terms.values()))


def wrong_shift(patch: pytest.MonkeyPatch) -> None:
    """Let times be shifted by 3 where no shift was asked for."""
    from difftrain.diffusion.flow import FlowTime

    patch.setattr(FlowTime, "shift_of", lambda self, bucket: 3.0)


def test_a_run_agrees_with_itself_made_anew(train: Train, right: Path, tmp_path: Path) -> None:
    found = compared(right, train("again"), tmp_path, 0)
    assert (found["verdict"], found["mean_relative_error"], found["first_divergence"]) == ("agree", 0.0, None)
    assert len(found["errors"]["steps"]) == STEPS and set(found["errors"]["loss"]) == {0.0}


# what parts, and by how much at least: each is noticed at the first step
FAULTS = {
    "a wrong GELU": (wrong_gelu, "step_loss", 1e-5),
    "an inverted attention mask": (inverted_mask, "step_loss", 1e-5),
    "a gradient scale that is dropped": (dropped_scale, "grad_norm", 0.9),
    "a wrong shift of the timestep": (wrong_shift, "step_loss", 1e-3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_step(
    fault: str, train: Train, right: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, what, error = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        wrong = train(fault.split()[-1])
    found = compared(right, wrong, tmp_path, 1)
    first = found["first_divergence"]
    assert (found["verdict"], first["step"], first["what"]) == ("part", 1, what) and first["error"] > error
    assert " step 1: " in capsys.readouterr().out
