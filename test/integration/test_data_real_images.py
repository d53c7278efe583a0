"""Real files: Pillow's own collection of odd, broken and hostile pictures, and photographs."""

import io
import shutil
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import rejects
from fetched import photographs, pillow_images
from PIL import Image, ImageOps

from difftrain.config import CaptionSection, DataSection
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.data.media.media import MIN_SIDE, Unusable, decode, probe
from difftrain.data.sources.base import is_picture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def odd():
    return next(pillow_images().rglob("Tests/images"))


@pytest.fixture(scope="module")
def files(odd):
    return sorted(path for path in odd.rglob("*") if is_picture(path.name) and path.is_file())


def rgb(path):
    return decode(path.read_bytes()).astype(int)


def difference(a, b):
    assert a.shape == b.shape
    return np.abs(a - b).mean()


def by_pillow(path):
    """Decode as Pillow's documentation says, an independent way: turn, then composite in floating point."""
    with Image.open(path) as image:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if not turned.has_transparency_data:
            return np.asarray(turned.convert("RGB")).astype(int)
        rgba = np.asarray(turned.convert("LA").convert("RGBA") if turned.mode == "La" else turned.convert("RGBA"))
        alpha = rgba[..., 3:] / 255
        return rgba[..., :3] * alpha + 255 * (1 - alpha)


def test_every_file_comes_out_as_pillow_shows_it_or_is_refused(files):
    assert len(files) > 600
    refused, compared = {}, 0
    for path in files:
        try:
            got = rgb(path)
        except Unusable as reason:
            refused[path.name] = reason.kind
            continue
        assert got.ndim == 3 and got.shape[2] == 3
        with Image.open(path) as image:
            plain = not image.mode.startswith(("I", "F"))
        if plain:
            want = by_pillow(path)
            assert want.shape == got.shape, path.name
            assert np.abs(got - want).max() <= 0.51, path.name
            compared += 1
    assert compared > 600
    kinds = {"broken", "truncated", "too pixels", "unsupported pixels", "not image"}
    assert set(map(rejects.kind, refused.values())) <= kinds
    assert len(refused) < 60


def test_headers_agree_with_pixels_and_find_the_cut_ones(files):
    """What probe calls whole decodes to the size it gave; what decodes is never refused by its header."""
    lenient = []
    for path in files:
        data = path.read_bytes()
        try:
            header = probe(data)
        except Unusable as reason:
            if reason.kind != "too small":
                with pytest.raises(Unusable):
                    decode(data)
            continue
        if not header.is_complete:
            continue
        try:
            height, width = decode(data).shape[:2]
        except Unusable:
            lenient.append(path.name)
        else:
            assert header.size_wh == (width, height), path.name
    assert len(lenient) <= 4, lenient  # animations with faults behind the first picture, and the like


def test_eight_orientations_are_one_picture(odd):
    upright = rgb(odd / "hopper.jpg")
    for form in ("jpg", "webp"):
        for orientation in range(2, 9):
            assert difference(rgb(odd / f"hopper_orientation_{orientation}.{form}"), upright) < 6, (form, orientation)
    first = rgb(odd / "g4_orientation_1.tif")
    for orientation in range(2, 9):
        assert difference(rgb(odd / f"g4_orientation_{orientation}.tif"), first) < 0.7, orientation


def test_colour_models(odd):
    assert difference(rgb(odd / "pil_sample_cmyk.jpg"), rgb(odd / "pil_sample_rgb.jpg")) < 6
    assert (rgb(odd / "lab.tif") >= 254).all()
    red, green = rgb(odd / "lab-red.tif").mean(axis=(0, 1)), rgb(odd / "lab-green.tif").mean(axis=(0, 1))
    assert red[0] > 250 and red[1] < 5 and green[1] > 140 and green[0] < 5
    for name in ("p_trns_single.png", "rgb_trns.png", "l_trns.png", "1_trns.png", "i_trns.png"):
        with Image.open(odd / name) as image:
            assert "transparency" in image.info
        assert (rgb(odd / name) == 255).all(axis=2).any(), name  # what is see-through shows white


def test_sixteen_bits(odd):
    for name in (
        "16bit.cropped.tif",
        "16bit.MM.cropped.tif",
        "16_bit_noise.tif",
        "uint16_1_4660.tif",
        "16bit.deflate.tif",
    ):
        with Image.open(odd / name) as image:
            want = np.floor(np.asarray(image).astype(float) / 257 + 0.5)
        assert (rgb(odd / name) == want[..., None]).all(), name
    with Image.open(odd / "12bit.cropped.tif") as image:
        want = np.floor(np.asarray(image).astype(float) * 255 / 4095 + 0.5)
    assert (rgb(odd / "12bit.cropped.tif") == want[..., None]).all()
    for name in ("tiff_16bit_RGB", "tiff_16bit_RGBa"):
        assert difference(rgb(odd / f"{name}.tiff"), rgb(odd / f"{name}_target.png")) <= 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("truncated_jpeg.jpg", "truncated"),
        ("truncated_image.png", "truncated"),
        ("ultrahdr.jpg", "truncated"),
        ("broken_data_stream.png", "broken"),
        ("broken.png", "broken"),
        ("decompression_bomb.gif", "too pixels"),
        ("png_decompression_dos.png", "broken"),
        ("zero_width.gif", "broken"),
    ],
)
def test_broken_and_hostile_files(odd, name, kind):
    with pytest.raises(Unusable) as caught:
        rgb(odd / name)
    assert rejects.kind(caught.value.kind) == kind


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_the_whole_collection_is_indexed(files, tmp_path, verify):
    """Nothing stops the index: what is good is in it, everything else has its name and reason."""
    root = tmp_path / "pictures"
    for path in files:
        target = root / path.relative_to(files[0].parents[1])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    section = DataSection(dirs=(str(root),), verify=verify, max_rejected_share=1.0)
    captions = CaptionSection(allow_empty=True)
    summary = build_index(section, captions, tmp_path / "index", log=lambda line: None, decode_limit_s=30)
    index = Index(Path(summary.folder))
    assert index.count + summary.rejected == len(files)
    assert "crashed" not in summary.reasons and "too slow" not in summary.reasons
    wrong = []
    for i in range(index.count):
        record = index.record(i)
        try:
            shape = decode(index.read(record.media)).shape[:2]
        except Unusable:
            wrong.append(record.name)
        else:
            assert shape == record.size_hw and min(shape) >= MIN_SIDE, record.name
    assert len(wrong) <= (0 if verify == "full" else 4), wrong


def test_photographs_from_a_tar_are_the_files(tmp_path):
    pictures = photographs()
    assert len(pictures) >= 5
    with tarfile.open(tmp_path / "0.tar", "w") as packed:
        for path in pictures:
            packed.add(path, path.name)
            words = f"a photograph called {path.stem}".encode()
            info = tarfile.TarInfo(f"{path.stem}.txt")
            info.size = len(words)
            packed.addfile(info, io.BytesIO(words))
    section = DataSection(dirs=(str(tmp_path / "0.tar"),))
    index = Index(Path(build_index(section, CaptionSection(), tmp_path / "index", log=lambda line: None).folder))
    assert index.count == len(pictures)
    by_name = {record.name.partition("!")[2]: record for record in index.records(range(index.count))}
    for path in pictures:
        record = by_name[path.name]
        assert index.read(record.media) == path.read_bytes()
        assert record.captions == (f"a photograph called {path.stem}",)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert record.size_hw == by_pillow(path).shape[:2]
