"""A decoder beside the host's: asked for whole JPEGs only, and what it refuses is the host's."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from difftrain.config.parse_flags import parse
from difftrain.contracts import ConfigFault
from difftrain.data.media import decoders
from difftrain.data.media.media import decode_for
from difftrain.data.recipe import Recipe
from difftrain.device import Device
from difftrain.train.check import check_device

asked: list[bool] = []  # whether each picture it was asked for is grey


def one_up(data: bytes, grey: bool) -> np.ndarray:
    """Decode with every value one higher."""
    asked.append(grey)
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("L" if grey else "RGB"))
    return np.minimum(picture, 254).reshape(*picture.shape[:2], -1) + np.uint8(1)


def refuses(data: bytes, grey: bool) -> np.ndarray:
    """Refuse every picture."""
    raise RuntimeError("progressive")


def coded(form: str, mode: str = "RGB", size: int = 64) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((size, size)).convert(mode).save(file, form)
    return file.getvalue()


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    for name in ("one_up", "refuses"):
        monkeypatch.setitem(decoders.DECODERS, name, f"{__name__}:{name}")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_the_other_s(other: None, mode: str) -> None:
    data = coded("JPEG", mode)
    host, found = (decode_for(data, (64, 64), decoder=name).pixels for name in ("host", "one_up"))
    assert found.shape == host.shape == (64, 64, 3) and asked == [mode == "L"]
    assert np.array_equal(found, np.minimum(host, 254) + 1)


def test_what_is_made_smaller_and_other_formats_are_the_host_s(other: None) -> None:
    for data, wanted in (
        (coded("JPEG", size=256), (64, 64)),
        (coded("PNG"), (64, 64)),
        (coded("JPEG", "CMYK"), (64, 64)),
    ):
        pair = [decode_for(data, wanted, decoder=name).pixels for name in ("host", "one_up")]
        assert np.array_equal(*pair)
    assert not asked


def test_what_it_refuses_is_the_host_s(other: None) -> None:
    data = coded("JPEG")
    assert np.array_equal(decode_for(data, (64, 64), decoder="refuses").pixels, decode_for(data, (64, 64)).pixels)


@pytest.mark.flags("image_decoder")
def test_it_is_refused_where_there_is_no_npu(tmp_path: Path) -> None:
    words = ["--init_from_config=tiny", f"--train_data_dir={tmp_path}", "--output_dir=out", "--resolution=64"]
    check_device(parse(words).config, Device("cpu"))
    cfg = parse([*words, "--image_decoder=device"]).config
    with pytest.raises(ConfigFault, match=r"--image_decoder=device: torchvision_npu .* NPU, .* cpu"):
        check_device(cfg, Device("cpu"))


def test_cached_features_of_another_decoder_are_others() -> None:
    from dataclasses import replace

    from difftrain.cache.manifest.address import MediaTransforms
    from difftrain.config.schema.sections import CaptionSection, DatasetSection
    from difftrain.data.plan.buckets import BucketTable

    recipe = Recipe(CaptionSection(), BucketTable.of(DatasetSection(resolution=(64, 64))), 1)
    made = [MediaTransforms([each], "vae", "fp32") for each in (recipe, recipe, replace(recipe, decoder="device"))]
    first, same, other = [cuts.address(0, (80, 90), False, bytes(16)) for cuts in made]
    assert first == same != other
