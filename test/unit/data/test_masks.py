"""Masks follow their pictures: resized, cut and mirrored alike, from alpha or from another folder."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from difftrain.config import TrainConfig
from difftrain.contracts import FeatureSpec
from difftrain.data.loader import make_loader
from difftrain.data.media.crop import fit
from difftrain.data.media.media import decode, decode_rgba
from difftrain.data.prepare import make_plan, open_data, prepare

SIZES = [(64, 64), (96, 48), (48, 96), (80, 80), (128, 64)]


def tokenize(captions):
    rows = [list(text.encode()[:60].ljust(60)) for text in captions]
    return {"input_ids_1": torch.tensor(rows, dtype=torch.int64)}


def noise(number, size_wh, channels):
    rng = np.random.Generator(np.random.Philox(key=number))
    return rng.integers(0, 256, (size_wh[1], size_wh[0], channels), dtype=np.uint8)


def write(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze()).save(path, **options)
    path.with_suffix(".txt").write_text(path.stem)


def batches(root, folder, epochs=1, **sections):
    """Return every sample of some epochs as (caption, pixels, mask); a mask is None where its batch has none."""
    sections["data"] = {
        "dirs": (str(folder),), "resolution": (64, 64), "enable_bucket": True, "min_bucket_reso": 32,
        "max_bucket_reso": 128, "bucket_reso_steps": 32, "workers": 0, "cache_dir": str(root / "cache"),
    } | sections.get("data", {})  # fmt: skip
    cfg = TrainConfig.model_validate({"training": {"batch_size": 1, "seed": 1}} | sections)
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    plan = make_plan(data, cfg, cfg.batch_sizes)
    loader = make_loader(
        data, plan, FeatureSpec({}, {}), tokenize, cfg,
        dp_rank=0, dp_size=1, first_step=0, last_step=plan.total_steps(epochs),
    )  # fmt: skip
    found = []
    for [batch] in loader:
        for i, row in enumerate(batch.features["input_ids_1"].tolist()):
            mask = None if batch.loss_mask is None else batch.loss_mask[i]
            found.append((bytes(row).decode().strip(), batch.features["pixels"][i], mask))
    return found, data


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures whose alpha is their red channel, so that a mask must look like the picture's red."""
    folder = tmp_path_factory.mktemp("alpha")
    for number, size in enumerate(SIZES):
        rgb = noise(number, size, 3)
        write(folder / f"p{number}.png", np.dstack([rgb, rgb[..., :1]]))
    return folder


@pytest.mark.flags("alpha_mask", "flip_aug", "random_crop")
@pytest.mark.parametrize("settings", [{}, {"flip": True}, {"random_crop": True}, {"flip": True, "random_crop": True}])
def test_alpha_masks_lie_where_the_pictures_do(tmp_path, pictures, settings):
    found, _ = batches(tmp_path, pictures, epochs=4, data={"alpha_mask": True, "enable_bucket": False} | settings)
    assert len(found) == 20
    for _, pixels, mask in found:
        assert mask.shape == (1, 64, 64) and mask.dtype == torch.float32
        assert torch.equal(mask[0], pixels[0].float() / 255)
    looks = {(name, pixels.numpy().tobytes()) for name, pixels, _ in found}
    assert (len(looks) > 5) == bool(settings)


@pytest.mark.flags("alpha_mask")
def test_what_is_under_the_alpha_is_seen_only_with_the_option(tmp_path, pictures):
    rgba = np.asarray(Image.open(pictures / "p0.png"))
    plain, _ = batches(tmp_path, pictures)
    masked, _ = batches(tmp_path, pictures, data={"alpha_mask": True})
    [over_white] = [pixels for name, pixels, _ in plain if name == "p0"]
    [stored] = [pixels for name, pixels, _ in masked if name == "p0"]
    assert all(mask is None for _, _, mask in plain)
    assert (stored.numpy() == rgba[..., :3].transpose(2, 0, 1)).all()
    white = np.floor((rgba[..., :3] * (rgba[..., 3:] / 255.0)) + 255 - rgba[..., 3:] + 0.5).transpose(2, 0, 1)
    assert np.abs(over_white.numpy() - white).max() <= 1


@pytest.mark.flags("alpha_mask")
def test_a_picture_without_alpha_counts_whole(tmp_path):
    write(tmp_path / "d" / "a.jpg", noise(1, (64, 64), 3))
    [(_, _, mask)], _ = batches(tmp_path, tmp_path / "d", data={"alpha_mask": True})
    assert torch.equal(mask, torch.ones(1, 64, 64))


@pytest.fixture
def masked(tmp_path):
    """Pictures, some in a sub-folder, and masks of their green channel in the mask's red one."""
    for number, size in enumerate(SIZES):
        rgb = noise(number, size, 3)
        below = "cats/" if number > 2 else ""
        write(tmp_path / "d" / f"{below}p{number}.png", rgb)
        mask = np.dstack([rgb[..., 1:2], noise(90, size, 2)])
        path = tmp_path / "m" / (f"{below}p{number}.webp" if number == 3 else f"p{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path, **({"lossless": True} if number == 3 else {}))
    return tmp_path


@pytest.mark.flags("masked_loss", "conditioning_data_dir")
def test_masks_of_another_folder_are_its_red_channel(masked):
    settings = {"data": {"conditioning_dir": str(masked / "m"), "flip": True, "random_crop": True}}
    found, _ = batches(masked, masked / "d", epochs=3, loss={"masked": True}, **settings)
    assert len(found) == 15
    for _, pixels, mask in found:
        assert torch.equal(mask[0], pixels[1].float() / 255)
    unmasked, _ = batches(masked, masked / "d", **settings)
    assert all(mask is None for _, _, mask in unmasked)


@pytest.mark.flags("conditioning_data_dir", "alpha_mask")
def test_a_mask_of_the_folder_wins_over_alpha(tmp_path, pictures):
    for number, size in enumerate(SIZES):
        (tmp_path / "m").mkdir(exist_ok=True)
        Image.new("L", size, 51).save(tmp_path / "m" / f"p{number}.png")
    settings = {"conditioning_dir": str(tmp_path / "m"), "alpha_mask": True}
    found, _ = batches(tmp_path, pictures, data=settings, loss={"masked": True})
    assert all(torch.equal(mask, torch.full_like(mask, 0.2)) for _, _, mask in found)


@pytest.mark.flags("conditioning_data_dir")
def test_a_picture_without_its_mask_is_rejected_by_name(masked):
    (masked / "m" / "p1.png").unlink()
    settings = {"data": {"conditioning_dir": str(masked / "m")}, "loss": {"masked": True}}
    found, data = batches(masked, masked / "d", **settings)
    assert sorted(name for name, _, _ in found) == ["p0", "p2", "p3", "p4"]
    [reject] = data.rejects()
    assert reject.path.endswith("d/p1.png") and reject.reason.startswith("no mask: ") and "p1" in reject.reason
    Image.new("L", (96, 48)).save(masked / "m" / "p1.png")  # it is looked for again
    assert len(batches(masked, masked / "d", **settings)[0]) == 5


@pytest.mark.flags("conditioning_data_dir")
def test_a_mask_may_be_smaller_but_of_its_pictures_shape(masked):
    settings = {"data": {"conditioning_dir": str(masked / "m")}, "loss": {"masked": True}}
    batches(masked, masked / "d", **settings)
    Image.new("L", (48, 24), 255).save(masked / "m" / "p1.png")
    found, _ = batches(masked, masked / "d", **settings)
    [mask] = [mask for name, _, mask in found if name == "p1"]
    assert torch.equal(mask, torch.ones_like(mask))


@pytest.mark.flags("conditioning_data_dir")
def test_the_mask_of_a_member_goes_by_its_whole_name(tmp_path):
    rgb = noise(1, (64, 64), 3)
    for folder, pixels in (("d", rgb), ("m", rgb[..., 1])):
        write(tmp_path / folder / "oh!my.png", pixels)
    (tmp_path / "t!").mkdir()
    with tarfile.open(tmp_path / "t!" / "a!.tar", "w") as shard:
        for name in ("oh!my.png", "oh!my.txt"):
            shard.add(tmp_path / "d" / name, name)
    write(tmp_path / "m" / "my.png", noise(2, (64, 64), 1))  # another picture's
    settings = {"data": {"conditioning_dir": str(tmp_path / "m")}, "loss": {"masked": True}}
    [(_, pixels, mask)], _ = batches(tmp_path, tmp_path / "t!", **settings)
    assert torch.equal(mask[0], pixels[1].float() / 255)


@pytest.mark.flags("resize_interpolation")
def test_the_interpolation_resizes_pictures_and_masks(tmp_path):
    rgb = noise(5, (200, 200), 3)
    write(tmp_path / "d" / "a.png", np.dstack([rgb, rgb[..., :1]]))
    looks = {}
    for name in (None, "nearest", "bilinear", "bicubic", "lanczos", "area"):
        [(_, pixels, mask)], _ = batches(
            tmp_path, tmp_path / "d", data={"alpha_mask": True, "resize_interpolation": name}
        )
        assert (pixels.numpy() == fit(rgb, (64, 64), (0, 0, 64, 64), False, name)).all()
        assert torch.equal(mask[0], pixels[0].float() / 255)
        looks[pixels.numpy().tobytes()] = name
    assert len(looks) == 5  # unset means area where it shrinks


def test_layers_are_what_is_stored():
    rgba = noise(3, (20, 30), 4)
    file = io.BytesIO()
    Image.fromarray(rgba).save(file, "PNG")
    assert (decode_rgba(file.getvalue()).pixels == rgba).all()
    grey, half = io.BytesIO(), io.BytesIO()
    Image.fromarray(rgba[..., 0]).save(grey, "PNG")
    Image.fromarray(rgba[..., :2], "LA").save(half, "PNG")
    found = decode_rgba(grey.getvalue()).pixels
    assert (found[..., :3] == rgba[..., :1]).all() and (found[..., 3] == 255).all()
    assert (decode_rgba(half.getvalue()).pixels == rgba[..., [0, 0, 0, 1]]).all()
    palette = io.BytesIO()
    indexed = Image.fromarray(rgba[..., :3]).quantize(8)
    indexed.save(palette, "PNG", transparency=2)
    found = decode_rgba(palette.getvalue()).pixels
    assert (found[..., :3] == np.asarray(indexed.convert("RGB"))).all()
    assert (found[..., 3] == np.where(np.asarray(indexed) == 2, 0, 255)).all()
    sixteen = io.BytesIO()
    Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100).save(sixteen, "PNG")
    assert (decode_rgba(sixteen.getvalue()).pixels[..., :3] == decode(sixteen.getvalue())).all()


@pytest.mark.flags("alpha_mask", "conditioning_data_dir", "caption_prefix", "enable_wildcard", "random_crop")
def test_every_subset_has_its_own_settings(tmp_path, pictures):
    """As subsets of a data set TOML do: masks from alpha, masks of a folder, and none, which counts whole."""
    for number, size in enumerate(SIZES):
        for name in ("b", "c"):
            write(tmp_path / name / f"{name}{number}.png", noise(number, size, 3))
        (tmp_path / "b" / f"b{number}.txt").write_text("one\ntwo")
        (tmp_path / "m").mkdir(exist_ok=True)
        Image.new("L", size, 51).save(tmp_path / "m" / f"b{number}.png")
    subsets = [
        {"image_dir": str(pictures), "alpha_mask": True, "random_crop": True, "captions": {"prefix": "P"}},
        {
            "image_dir": str(tmp_path / "b"),
            "conditioning_dir": str(tmp_path / "m"),
            "captions": {"enable_wildcard": True},
        },
        {"image_dir": str(tmp_path / "c")},
    ]
    dataset = {"resolution": (64, 64), "batch_size": 3, "subsets": subsets}
    settings = {"dirs": (), "resolution": None, "enable_bucket": False, "datasets": [dataset]}
    found, data = batches(tmp_path, tmp_path, epochs=6, loss={"masked": True}, data=settings)
    assert len(data.recipes) == 3 and {"one", "two", "c0", "P p0"} <= {name for name, _, _ in found}
    for name, pixels, mask in found:
        if name.startswith("P "):
            assert torch.equal(mask[0], pixels[0].float() / 255)
        elif not name.startswith("c"):
            assert torch.equal(mask, torch.full((1, 64, 64), 0.2))
        else:
            assert mask is None or torch.equal(mask, torch.ones(1, 64, 64))
    assert any(name.startswith("c") and mask is not None for name, _, mask in found)
