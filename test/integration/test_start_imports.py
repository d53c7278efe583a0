"""What a start imports: describing encoders needs none of their classes, which take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import warm
from doors import Door, write_pictures

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "library"


def test_describing_encoders_imports_no_class() -> None:
    """Sizes, counts, fingerprints and features of what may be cached, of a family on the kit."""
    code = (
        f"import sys; sys.path.insert(0, {str(LIBRARY)!r})\n"
        "from difftrain.config import TrainConfig\n"
        "from difftrain.models.registry import make_family\n"
        "family = make_family(TrainConfig.model_validate({'model': {'family': 'sd3', 'init_from_config': 'tiny'}}))\n"
        "from difftrain.contracts import Parts\n"
        "import difftrain.models.build as sizes\n"
        "complete = sizes.complete\n"
        "sizes.complete = lambda kind, given: dict(given) if 'Transformer' in kind else complete(kind, given)\n"
        "family.agree = ()\n"
        "found = {name: (each.fingerprint(), each.features) for name, each in family.encoders(Parts(None)).items()}\n"
        "counts = [family.source.count(part) for part in family.parts if part != 'transformer']\n"
        "assert len(found) == 4 and len(counts) == 4 and not {'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sdxls_source_imports_no_class_of_an_encoder() -> None:
    """What a start with a whole cache asks of encoders: sizes, counts, and what decides."""
    code = (
        f"import sys; sys.path.insert(0, {str(LIBRARY)!r})\n"
        "from difftrain.config.hidden_imports import hold_back\n"
        "hold_back()\n"  # as every door does
        "from difftrain.config import TrainConfig\n"
        "from difftrain.models.registry import make_family\n"
        "made = make_family(TrainConfig.model_validate({'model': {'family': 'sdxl', 'init_from_config': 'tiny'}})).source\n"
        "told = [(made.decisive(part), made.count(part)) for part in ('vae', 'text_encoder_1', 'text_encoder_2')]\n"
        "ends = ('clip.modeling_clip', 'autoencoders.autoencoder_kl')\n"
        "assert len(told) == 3 and not [name for name in sys.modules if name.endswith(ends)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_workers_that_look_at_images_import_no_schema() -> None:
    """Each of many processes would spend as long on it as on all else that it imports."""
    code = (
        f"import sys; sys.path.insert(0, {str(LIBRARY)!r})\n"
        "import difftrain.data.index.inspection, difftrain.data.index.worker_pool\n"
        "assert not {'pydantic', 'torch', 'difftrain.config.schema.sections'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scipy_comes_in_where_it_is_called() -> None:
    """Schedulers of diffusers import it for noise levels that few ask for; it takes a second of every start."""
    code = (
        "import sys\n"
        "loaded = lambda: {name for name in sys.modules if name.startswith('scipy.') and name.count('.') == 1}\n"
        "from diffusers import DPMSolverMultistepScheduler, LMSDiscreteScheduler\n"
        "assert not loaded() & {'scipy.optimize', 'scipy.linalg', 'scipy.special'}, loaded()\n"
        "made = DPMSolverMultistepScheduler(use_beta_sigmas=True)\n"
        "made.set_timesteps(3)\n"
        "assert made.sigmas.isfinite().all() and 'scipy.special' in loaded()\n"
        "lms = LMSDiscreteScheduler()\n"
        "lms.set_timesteps(3)\n"
        "assert lms.get_lms_coefficient(1, 1, 0) < 0\n"
        "import scipy.stats, scipy.integrate\n"
        "assert scipy.stats.__file__ and scipy.integrate.__file__"
    )
    done = warm.completed([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def test_garbage_is_collected_again_before_the_first_step(tmp_path: Path) -> None:
    door = Door(write_pictures(tmp_path / "pictures"), tmp_path / "cache")
    code = (
        f"import gc, sys; sys.path[:0] = [{str(ROOT)!r}, {str(LIBRARY)!r}]\n"
        "from difftrain.cli.train import train_sdxl\n"
        "from difftrain.train import run\n"
        "run.train = lambda *_: print('collects', gc.isenabled(), gc.get_freeze_count() > 0) or sys.exit(0)\n"
        "train_sdxl(sys.argv[1:])"
    )
    done = warm.completed([sys.executable, "-c", code, *door.flags(tmp_path / "out")], env={**os.environ, **door.env})
    assert "collects True True" in done.stdout, done.stdout + done.stderr
