"""Samples from the cache: those of online training, with no picture decoded, and rejects that others stand in for."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from difftrain.cache.decoding import DecodingDataset
from difftrain.cache.manifest.address import MASKS, text_addresses
from difftrain.cache.manifest.manifest import AddressByRecord, CacheManifest, ManifestRequest
from difftrain.cache.request import build_manifests, mask_encoder
from difftrain.config import TrainConfig
from difftrain.contracts import CAPTION, PIXELS, Encoder, Feature, FeatureSpec
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.features import (
    CachedCaptions,
    CachedMasks,
    CachedPictures,
    CaptionEncoderCache,
    FeatureStore,
    PictureEncoderCache,
)
from difftrain.data.index.index import Index
from difftrain.data.loader import make_loader
from difftrain.data.prepare import make_plan, open_data, prepare

SIZES = [(64, 64)] * 6 + [(96, 40)] * 4
FEATURES = FeatureSpec(features={}, draws={})


def tokenize(captions):
    """Stand in for a tokenizer: the text itself."""
    return {"input_ids_1": torch.tensor([list(text.encode()[:40].ljust(40)) for text in captions])}


def small(batch):
    """Stand in for a VAE."""
    return {"latents": torch.nn.functional.avg_pool2d(batch.features["pixels"].float(), 8)}


def hidden(batch):
    """Stand in for a text encoder."""
    return {"hidden_1": batch.features["input_ids_1"].float().cumsum(1) / 7}


PICTURES = Encoder(PIXELS, {"latents": Feature(3, factor=8)}, (), "", small, lambda: "vae")
TEXT = Encoder(CAPTION, {"hidden_1": Feature(40)}, (), "", hidden, lambda: "te", inputs=("input_ids_1",))


class Reader:
    """Stand in for the reader of a cache."""

    def __init__(self) -> None:
        self.entries: dict[bytes, dict[str, torch.Tensor]] = {}
        self.rejects: dict[bytes, str] = {}

    def read(self, addresses):
        found = [self.entries[each] for each in addresses]
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    def reject(self, address):
        return self.rejects.get(address)


def built(data):
    """Encode all that is wanted, and return the data that read it."""
    asked = [
        ManifestRequest("latents", PICTURES, "vae", "fp32", 4),
        ManifestRequest("text_encoder_1", TEXT, "te", "fp32", 4),
    ]
    masks = mask_encoder(data.recipes)
    asked += [ManifestRequest(MASKS, masks, "masks", "uint8", 4)] if masks else []
    lists = build_manifests(data, asked, tokenize, log=lambda line: None)
    readers = {}
    for each in asked:
        wanted, reader = CacheManifest(lists[each.name]), Reader()
        for n in range(wanted.batches):
            piece = DecodingDataset(data, wanted, tokenize)[n]
            for row, (_, reason) in piece.rejected.items():
                reader.rejects[wanted.addresses[row].tobytes()] = reason
            made = each.encoder.encode(piece.batch) if piece.batch else {}
            for i, key in enumerate(piece.batch.keys if piece.batch else ()):
                reader.entries[key] = {name: value[i] for name, value in made.items()}
        readers[each.name] = reader
    addresses = partial(text_addresses, inputs=TEXT.inputs, fingerprint="te", storage="fp32")
    store = FeatureStore(
        CachedPictures((PictureEncoderCache(readers["latents"], AddressByRecord(lists["latents"]).addresses),)),
        CachedCaptions((CaptionEncoderCache(readers["text_encoder_1"], addresses),)),
        CachedMasks(PictureEncoderCache(readers[MASKS], AddressByRecord(lists[MASKS]).addresses)) if masks else None,
    )
    return dataclasses.replace(data, store=pickle.loads(pickle.dumps(store)))


def config(root, **sections):
    folder = root / "data"
    folder.mkdir()
    for number, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 4), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"one {number}, two, three, four, five")
    data = {
        "dirs": (str(folder),),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "workers": 0,
        "cache_dir": str(root / "cache"),
    } | sections.pop("data", {})
    return TrainConfig.model_validate({"data": data, "training": {"batch_size": 2, "seed": 1}} | sections)


def opened(cfg):
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def batches_of(cfg, data, last=20):
    plan = make_plan(data, cfg, cfg.training.batch_size)
    place = {"dp_rank": 0, "dp_size": 1, "first_step": 0, "last_step": last}
    return [micro for step in make_loader(data, plan, FEATURES, tokenize, cfg, **place) for micro in step]


def nothing_is_read(self, media):
    raise AssertionError(f"{media.path} was read, though it is cached")


@pytest.mark.flags("cache_shuffle_num", "flip_aug", "alpha_mask")
def test_samples_from_the_cache_are_those_of_online_training(tmp_path, monkeypatch):
    cfg = config(
        tmp_path,
        data={"flip": True, "alpha_mask": True},
        captions={"shuffle": True, "dropout_rate": 0.2, "keep_tokens": 1},
        cache={"shuffle_num": 3},
        validation={"split": 0.3, "seed": 2},
    )
    data = opened(cfg)
    cached = built(data)
    online, held = batches_of(cfg, data), list(held_out_set(cfg, data).batches(tokenize, FEATURES))
    monkeypatch.setattr(Index, "read", nothing_is_read)
    found, held_found = batches_of(cfg, cached), list(held_out_set(cfg, cached).batches(tokenize, FEATURES))
    assert held and len(held) == len(held_found)
    for wanted, batch in zip(online + held, found + held_found, strict=True):
        assert "pixels" not in batch.features and batch.keys == wanted.keys and not batch.rejects
        assert batch.features["latents"].equal(small(wanted)["latents"])
        assert batch.features["hidden_1"].equal(hidden(wanted)["hidden_1"])
        assert batch.features["input_ids_1"].equal(wanted.features["input_ids_1"])
        assert batch.loss_mask is not None and batch.loss_mask.equal(wanted.loss_mask)
        for name in ("original_size", "crop_top_left", "target_size"):
            assert batch.features[name].equal(wanted.features[name])
    texts = {bytes(row.tolist()).decode().strip() for batch in found for row in batch.features["input_ids_1"]}
    assert "" in texts and len(texts) > len(SIZES)


def test_a_picture_that_was_rejected_has_another_stand_in_for_it(tmp_path):
    cfg = config(tmp_path, data={"verify": "quick"})
    bad = tmp_path / "data" / "3.png"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:200] + bytes(len(whole) - 212) + whole[-12:])
    data = built(opened(cfg))
    batches = batches_of(cfg, data)
    assert {each.path.rpartition("/")[2] for batch in batches for each in batch.rejects} == {"3.png"}
    assert all(len(batch.keys) == 2 for batch in batches)


@pytest.mark.flags("conditioning_data_dir")
def test_of_several_sources_only_some_may_have_masks(tmp_path):
    masks, other = tmp_path / "masks", tmp_path / "other"
    masks.mkdir()
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (20 * number, 0, 0)).save(masks / f"{number}.png")
    cfg = config(tmp_path)
    shutil.copytree(tmp_path / "data", other)
    subsets = [{"image_dir": str(tmp_path / "data"), "conditioning_dir": str(masks)}, {"image_dir": str(other)}]
    dataset = {"subsets": subsets, "resolution": (64, 64), "batch_size": 3}
    cfg = TrainConfig.model_validate(
        {
            "data": {"datasets": [dataset], "cache_dir": str(tmp_path / "cache"), "workers": 0},
            "loss": {"masked": True},
            "training": {"batch_size": 3, "seed": 1},
        }
    )
    data = opened(cfg)
    for wanted, batch in zip(batches_of(cfg, data), batches_of(cfg, built(data)), strict=True):
        assert (wanted.loss_mask is None and batch.loss_mask is None) or batch.loss_mask.equal(wanted.loss_mask)


@pytest.mark.parametrize("more", [{"masks_optional": True}, {"default_mask": "default.png"}])
def test_masks_that_some_pictures_lack_are_cached_as_they_are_made_online(tmp_path, more):
    masks = tmp_path / "masks"
    masks.mkdir()
    for number, size in list(enumerate(SIZES))[::2]:
        Image.new("RGB", size, (20 * number, 0, 0)).save(masks / f"{number}.png")
    Image.new("RGB", (7, 5), (99, 0, 0)).save(tmp_path / "default.png")
    config(tmp_path)
    more = {name: str(tmp_path / value) if name == "default_mask" else value for name, value in more.items()}
    subsets = [{"image_dir": str(tmp_path / "data"), "conditioning_dir": str(masks), "flip": True, **more}]
    cfg = TrainConfig.model_validate(
        {
            "data": {
                "datasets": [
                    {"subsets": subsets, "sizes": ((64, 64), (32, 96)), "enable_bucket": True, "batch_size": 3}
                ],
                "cache_dir": str(tmp_path / "cache"),
                "workers": 0,
            },
            "loss": {"masked": True},
            "training": {"batch_size": 3, "seed": 1},
        }
    )
    data = opened(cfg)
    pairs = list(zip(batches_of(cfg, data), batches_of(cfg, built(data)), strict=True))
    for wanted, batch in pairs:
        assert (wanted.loss_mask is None) == (batch.loss_mask is None)
        assert wanted.loss_mask is None or batch.loss_mask.equal(wanted.loss_mask)
    assert any(wanted.loss_mask is not None for wanted, _ in pairs)
