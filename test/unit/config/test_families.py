"""Keys of train.py that hang on the family: parts from elsewhere, guidance, and what is known and not built yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about

from difftrain.config.digest import differences, identity
from difftrain.config.parse_flags import parse as by_flags
from difftrain.config.parse_keys import parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault

TOML = """
[model]
type = "{family}"
{model}
[data]
dirs = ["{here}"]
resolution = [64, 64]
[training]
max_steps = 4
[output]
output_dir = "{here}/out"
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("whole", "one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def read(here: Path, family: str, model: str, *options: str) -> TrainConfig:
    """Read a file with these keys of [model], whose paths stand beside it."""
    file = here / "run.toml"
    file.write_text(TOML.format(family=family, model=model, here=here))
    return parse([f"--config={file}", *options]).config


def faults(here: Path, family: str, model: str, *options: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        read(here, family, model, *options)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(("family", "key", "field"), [
    ("sd3", "t5_path = 'one'", "text_encoder3"),
    ("sd3", "text_encoders = [{type = 'clip_g', path = 'one'}]", "text_encoder2"),
    ("sd3", "text_encoders = [{type = 't5xxl', path = 'one'}]", "text_encoder3"),
    ("sd3", "text_encoder_path = 'one'", "text_encoder1"),
    ("sd3", "transformer_path = 'one'", "transformer"),
    ("sd3", "vae_path = 'one'", "vae"),
    ("flux", "t5_path = 'one'", "text_encoder2"),
    ("flux", "clip_path = 'one'", "text_encoder1"),
    ("flux", "text_encoders = [{type = 't5', path = 'one'}]", "text_encoder2"),
    ("flux", "diffusion_model = 'one'", "transformer"),
    ("hidream", "llama3_path = 'one'", "text_encoder4"),
])  # fmt: skip
def test_a_part_goes_where_the_family_has_it(here: Path, family: str, key: str, field: str) -> None:
    given = read(here, family, f"diffusers_path = 'whole'\n{key}").model
    parts = ("transformer", "vae", "text_encoder1", "text_encoder2", "text_encoder3", "text_encoder4")
    assert {part: getattr(given, part) for part in parts if getattr(given, part)} == {field: str(here / "one")}


@pytest.mark.parametrize(("family", "key", "facts"), [
    ("sd3", "clip_path = 'one'", ["clip_path", "SD3", "2"]),
    ("sd3", "llm_path = 'one'", ["llm_path", "SD3", "no"]),
    ("sdxl", "t5_path = 'one'", ["t5_path", "SDXL", "no"]),
    ("sdxl", "text_encoder_path = 'one'", ["text_encoder_path", "sd3's", "SDXL"]),
    ("flux", "text_encoder3 = 'one'", ["text_encoder3", "sd3's", "Flux.1"]),
    ("flux", "t5_path = 'one'\ntext_encoder2 = 'two'", ["t5_path", "contradicts", "text_encoder2"]),
    ("flux", "t5_path = 'nowhere'", ["t5_path", "'nowhere'"]),
    ("sdxl", "guidance = 3.5", ["guidance", "flux's", "SDXL"]),
    ("flux", "guidance = -1", ["guidance", "0", "-1"]),
])  # fmt: skip
def test_what_the_family_has_not_is_named(here: Path, family: str, key: str, facts: list[str]) -> None:
    (fault,) = faults(here, family, f"diffusers_path = 'whole'\n{key}")
    assert is_about(fault, *facts)


def test_the_command_line_wins_whichever_way_a_part_is_named(here: Path) -> None:
    given = f"--model.text_encoder2={here / 'two'}"
    assert read(here, "flux", "diffusers_path = 'whole'\nt5_path = 'one'", given).model.text_encoder2 == str(
        here / "two"
    )
    other = read(here, "sd3", "diffusers_path = 'whole'\nt5_path = 'one'", "--model.type=flux").model
    assert other.text_encoder2 == str(here / "one") and other.text_encoder3 is None


def test_flux_has_defaults_of_its_own(here: Path) -> None:
    cfg = read(here, "flux", "init_from_config = 'tiny'\nguidance = 3.5")
    assert cfg.model.guidance == 3.5 and cfg.model.t5_max_length == 512 and cfg.sample.sampler == "flow_euler"
    assert cfg.cache.latents_to_disk and cfg.optimizer.learning_rate == 1e-4
    for family in ("sdxl", "sd3"):
        assert read(here, family, "init_from_config = 'tiny'\nguidance = 1").model.t5_max_length == 256


def test_the_other_door_knows_what_flux_is(here: Path) -> None:
    line = [f"--train_data_dir={here}", f"--output_dir={here}/out", "--resolution=64,64", "--init_from_config=tiny"]
    cfg = by_flags([*line, "--family=flux"]).config
    assert cfg.model.t5_max_length == 512 and cfg.sample.sampler == "flow_euler" and not cfg.cache.latents_to_disk
    with pytest.raises(ConfigFault) as caught:
        by_flags([*line, "--family=ltx2"])
    assert any(is_about(fault, "--family", "'ltx2'") for fault in caught.value.faults)


def test_a_layout_that_a_family_has_not(here: Path) -> None:
    (fault,) = faults(here, "flux", "init_from_config = 'tiny'", "--save.model_as=ckpt")
    assert is_about(fault, "--save.model_as", "ckpt", "flux", "safetensors, diffusers, diffusers_safetensors")
    read(here, "flux", "init_from_config = 'tiny'", "--save.model_as=safetensors")


def test_runs_of_before_are_known_again() -> None:
    plain = identity(TrainConfig())
    assert "model.guidance" not in plain
    other = identity(TrainConfig.model_validate({"model": {"family": "flux", "guidance": 2.0}}))
    assert "model.guidance: None there, 2.0 here" in differences(plain, other)
