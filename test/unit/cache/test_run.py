"""Training from cached features: the very inputs of online training, and nothing stale, missing or encoded twice."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cached import (
    BOTH,
    CAPTIONS,
    FLIPPED,
    ON_DISK,
    PICTURES,
    SIZES,
    break_picture,
    config,
    entries,
    loaded,
    make,
    same_inputs,
)
from PIL import Image

from difftrain.cache import build, encoding, request
from difftrain.contracts import ConfigFault, DataFault, TrainingFault
from difftrain.data import samples
from difftrain.data.loader import make_loader
from difftrain.data.prepare import global_batches, make_plan
from difftrain.device import choose
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.testing.pictures import picture, write_folder

Change = Callable[[Path], None]


@pytest.mark.flags(
    "cache_latents", "cache_text_encoder_outputs", "cache_latents_to_disk", "cache_text_encoder_outputs_to_disk"
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("where", [BOTH, ON_DISK])
def test_inputs_from_the_cache_are_those_of_online_training(
    pictures: Path, tmp_path: Path, where: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"validation": {"split": 0.3}, "training": {"mixed_precision": precision}}
    online = make(config(pictures, tmp_path, **sections))
    cached = make(config(pictures, tmp_path, where, **sections))
    same_inputs(cached, online, precision, {"no": 1e-5, "bf16": 3e-2}[precision])  # other batches round otherwise

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("with a cache nothing is decoded or encoded")

    monkeypatch.setattr(samples, "decode_layers", refuse)
    monkeypatch.setattr(cached.parts.frozen["vae"], "encode", refuse)
    monkeypatch.setattr(cached.parts.frozen["text_encoder_1"], "forward", refuse)
    for batch in cached.batches():
        assert {"moments", "hidden_1", "hidden_2", "pooled"} <= batch.features.keys()
        assert "pixels" not in batch.features
        cached.family.inputs(batch, cached.parts)
    assert cached.parts.offloaded == {"vae", "text_encoder_1", "text_encoder_2"}


@pytest.mark.parametrize("one", ["latents", "text"])
def test_each_can_be_cached_alone(pictures: Path, tmp_path: Path, one: str) -> None:
    made = make(config(pictures, tmp_path, {one: True}))
    features = next(made.batches()).features.keys()
    assert ("moments" in features) == ("pixels" not in features) == (one == "latents")
    assert ("hidden_1" in features) == (one == "text")
    assert made.parts.offloaded == ({"vae"} if one == "latents" else {"text_encoder_1", "text_encoder_2"})
    weights = [each for name in made.parts.offloaded for each in made.parts.frozen[name].parameters()]
    size = request.bytes_text(sum(4 * each.numel() for each in weights))
    assert re.search(rf" host, {size} less .* device$", made.parts.notes[-1])


def test_a_flip_is_cached_only_where_it_is_drawn(pictures: Path, tmp_path: Path, calls: list[int]) -> None:
    one = make(config(pictures, tmp_path, {"latents_to_disk": True}, data={"flip": False})).data.store.pictures
    assert sum(calls) == PICTURES
    both = make(config(pictures, tmp_path, {"latents_to_disk": True})).data.store.pictures
    plain, mirrored = (both.read([3], [each])["moments"] for each in (False, True))
    assert not plain.equal(mirrored) and one.read([3], [False])["moments"].equal(plain)
    assert entries(tmp_path) == FLIPPED  # those that were there were not written again


def test_equal_captions_are_encoded_once(pictures: Path, tmp_path: Path, calls: list[int]) -> None:
    make(config(pictures, tmp_path, {"text": True}))
    assert calls == [CAPTIONS, CAPTIONS]  # by each of two encoders


def test_what_prefix_and_suffix_make_of_captions_is_what_is_encoded(pictures: Path, tmp_path: Path) -> None:
    captions = {"prefix": "one", "suffix": "more", "keep_tokens_separator": "|||", "secondary_separator": ";"}
    cached = make(config(pictures, tmp_path, {"text": True}, captions=captions))
    online, plain = make(config(pictures, tmp_path, captions=captions)), make(config(pictures, tmp_path))
    same_inputs(cached, online)
    pairs = [(a.family.text(b, a.parts)["hidden_2"]) for a in (cached, plain) for b in a.batches()]
    half = len(pairs) // 2
    assert not any(torch.allclose(a, b, atol=1e-2) for a, b in zip(pairs[:half], pairs[half:], strict=True))


@pytest.mark.flags("vae_batch_size", "cache_batch_size")
def test_encoders_take_as_many_at_once_as_asked(pictures: Path, tmp_path: Path, calls: list[int]) -> None:
    model = {"init_from_config": "tiny"}
    make(config(pictures, tmp_path, {"latents": True}, model=model | {"vae_batch_size": 4}))
    assert max(calls) == 4 and sum(calls) == FLIPPED
    calls.clear()
    make(config(pictures, tmp_path, {"latents": True}, model=model, data={"flip": False}))
    assert max(calls) == 3  # the micro batch
    calls.clear()
    make(config(pictures, tmp_path, {"text": True, "batch_size": 5}))
    assert calls == [5, 5, 5, 5, 5, 5][: len(calls)] or set(calls) == {5, CAPTIONS % 5}


def test_a_later_run_reads_what_is_there(pictures: Path, own: Path, calls: list[int]) -> None:
    first = make(config(pictures, own, ON_DISK))
    sections = {"validation": {"split": 0.4}, "training": {"batch_size": 1}}
    again = make(config(pictures, own, ON_DISK, **sections))
    assert calls == []  # neither split nor batch size count
    assert first.kept().equal(again.kept()) and again.parts.offloaded


def another_picture(root: Path) -> None:
    (root / "folder" / "0003.png").write_bytes(picture(777, SIZES[3]))


def another_caption(root: Path) -> None:
    (root / "folder" / "0003.txt").write_text("something else")


def one_more(root: Path) -> None:
    write_folder(root / "folder", [(64, 64)], start=50)


def one_less(root: Path) -> None:
    (root / "folder" / "0003.png").unlink()


@pytest.mark.parametrize(
    ("change", "latents", "texts"),
    [(another_picture, 2, 0), (another_caption, 0, 1), (one_more, 2, 1), (one_less, 0, 0)],
)
def test_changed_data_cost_only_themselves(
    pictures: Path, tmp_path: Path, change: Change, latents: int, texts: int
) -> None:
    shutil.copytree(pictures / "folder", tmp_path / "data" / "folder")
    shutil.copytree(pictures / "table", tmp_path / "data" / "table")
    cfg = config(tmp_path / "data", tmp_path / "cache", ON_DISK)
    make(cfg)
    before = entries(tmp_path / "cache")
    change(tmp_path / "data")
    cached = make(cfg)
    assert entries(tmp_path / "cache") == before + latents + 2 * texts
    same_inputs(cached, make(config(tmp_path / "data", tmp_path / "cache")))


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"resize_interpolation": "nearest"}},
        {"data": {"bucket_reso_steps": 64}},
        {"training": {"mixed_precision": "bf16"}},
        {"model": {"init_from_config": "tiny", "clip_skip": 1}},
        {"model": {"init_from_config": "tiny", "max_token_length": 150}},
    ],
)
def test_another_way_to_encode_never_meets_a_stale_entry(
    pictures: Path, own: Path, calls: list[int], change: dict[str, Any]
) -> None:
    cached, online = (make(config(pictures, own, where, **change)) for where in (ON_DISK, {}))
    assert calls
    precision = cached.cfg.training.mixed_precision
    same_inputs(cached, online, precision, 1e-5 if precision == "no" else 3e-2)


@pytest.mark.flags("cache_preload")
def test_a_cache_in_memory_is_read_as_the_one_on_disk(
    pictures: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make(config(pictures, own, ON_DISK)).digest()
    found = make(config(pictures, own, {**ON_DISK, "preload": True}))
    for segment in (own / "segments").glob("*.bin"):
        segment.unlink()  # nothing of it is read any more
    assert found.digest() == digest
    with pytest.raises(TrainingFault):
        make(config(pictures, own, {**ON_DISK, "skip_check": True, "trust": True})).digest()


@pytest.mark.flags("cache_segment_gib")
def test_a_segment_is_sealed_at_its_size(pictures: Path, tmp_path: Path) -> None:
    make(config(pictures, tmp_path, {"latents_to_disk": True, "segment_gib": 1e-5}))
    sizes = [path.stat().st_size for path in (tmp_path / "segments").glob("*.bin")]
    assert len(sizes) > 3 and sum(sizes) > 2 * 2**30 * 1e-5


@pytest.mark.flags("cache_workers")
def test_workers_that_decode_are_as_many_as_asked(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    inner = encoding.decoded_batches

    def pieces(decoding: Any, handed: Any, workers: int) -> Any:
        seen.append(workers)
        return inner(decoding, handed, 0)

    monkeypatch.setattr(encoding, "decoded_batches", pieces)
    monkeypatch.setattr(build, "num_workers", lambda wanted, ranks, **_: wanted)
    make(config(pictures, tmp_path / "a", {"latents": True, "workers": 2}))
    make(config(pictures, tmp_path / "a", {"latents": True}, data={"workers": 3}))
    assert seen == [2, 3]


def test_what_cannot_be_decoded_is_replaced_as_online_and_not_tried_again(
    pictures: Path, tmp_path: Path, calls: list[int]
) -> None:
    shutil.copytree(pictures / "folder", tmp_path / "data" / "folder")
    shutil.copytree(pictures / "table", tmp_path / "data" / "table")
    bad = tmp_path / "data" / "folder" / "0000.png"
    break_picture(bad)
    quick = {"data": {"verify": "quick"}, "validation": {"split": 0.2}}
    online, cached, on_disk = (
        make(config(tmp_path / "data", tmp_path, where, **quick)) for where in ({}, BOTH, ON_DISK)
    )
    count = len(calls)
    again = make(config(tmp_path / "data", tmp_path, ON_DISK, **quick))
    assert len(calls) == count
    batches = [list(made.batches()) for made in (online, cached, on_disk, again)]
    assert {reject.path for batch in batches[0] for reject in batch.rejects} == {str(bad)}
    for others in batches[1:]:
        for ours, theirs in zip(others, batches[0], strict=True):
            assert ours.rejects == theirs.rejects and ours.record_id.equal(theirs.record_id)
    for made in (cached, on_disk, again):
        assert [reject.path for reject in made.rejects] == [str(bad)] and "broken" in made.rejects[0].reason
    assert not online.rejects and "0000.png" in (tmp_path / "rejected.jsonl").read_text()


def test_too_many_broken_pictures_stop_the_run(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures / "folder", tmp_path / "data" / "folder")
    shutil.copytree(pictures / "table", tmp_path / "data" / "table")
    for file in (tmp_path / "data" / "folder").glob("*.png"):
        break_picture(file)
    cfg = config(tmp_path / "data", tmp_path, {"latents": True}, data={"verify": "quick"})
    with pytest.raises(DataFault, match=r"8 of 13 .*\(--max_rejected_share=0\.5\), .*\.png: broken"):
        make(cfg)


def test_what_an_encoder_makes_that_is_no_number_is_rejected(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = SDXLFamily.encoders

    def spoilt(family: SDXLFamily, parts: Any) -> Any:
        found = described(family, parts)
        inner = found["latents"].encode

        def encode(batch: Any) -> dict[str, torch.Tensor]:
            made = inner(batch)
            made["moments"][batch.record_id == 3] = torch.nan
            return made

        return found | {"latents": dataclasses.replace(found["latents"], encode=encode)}

    monkeypatch.setattr(SDXLFamily, "encoders", spoilt)
    (reject,) = make(config(pictures, tmp_path, {"latents_to_disk": True})).rejects
    assert "not finite" in reject.reason


@pytest.mark.flags("cache_latents_dtype", "cache_text_dtype", "cache_dtypes")
def test_a_dtype_that_cannot_hold_a_value_stops_the_build(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = SDXLFamily.encoders

    def large(family: SDXLFamily, parts: Any) -> Any:
        found = described(family, parts)
        inner = found["latents"].encode
        return found | {
            "latents": dataclasses.replace(
                found["latents"], encode=lambda batch: {"moments": inner(batch)["moments"] + 1e6}
            )
        }

    monkeypatch.setattr(SDXLFamily, "encoders", large)
    with pytest.raises(TrainingFault, match=r"latents: .*: moments: .* 1\.?\d*e\+06 .*float16 .*65504.*--cache_dtypes"):
        make(config(pictures, tmp_path, {"latents_to_disk": True, "latents_dtype": "fp16"}))


@pytest.mark.parametrize("where", [BOTH, ON_DISK])
def test_what_does_not_fit_is_refused_before_anything_is_encoded(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any], calls: list[int]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(request.host, "available_bytes", lambda: 1000)
    monkeypatch.setattr(request.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigFault) as caught:
        make(config(pictures, tmp_path, where))
    said = str(caught.value)
    assert not calls and "KiB" in said and "1000 B are free" in said
    assert ("name another --cache_dir" in said) == (where == ON_DISK)
    assert ("--cache_latents_to_disk keeps it" in said) == (where == BOTH)


@pytest.mark.flags("cache_latents_dtype", "cache_dtypes")
def test_the_plan_says_bytes_a_feature_and_what_is_missing(pictures: Path, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        cache = {**ON_DISK, "latents_dtype": "bf16", "dtypes": {"hidden_2": "fp8"}}
        make(config(pictures, tmp_path, cache))
    cells = 10 * 8 * 8 + 2 * 4 * 12 + 1 * 12 * 4
    each = f"moments {2 * 16 * cells * 2 / PICTURES / 1024:.4g} KiB in bfloat16"
    assert re.search(rf"latents: {FLIPPED} .*{re.escape(each)}", caplog.text)
    assert re.search(rf"latents: .*\b0 .*, {FLIPPED} ", caplog.text)
    assert "in float8_e4m3fn, pooled 128 B in float32" in caplog.text
    assert "are free" in caplog.text
    assert re.search(rf"latents: {FLIPPED} .*\d s\b", caplog.text)


def test_masks_are_cached_with_the_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(4):
        noise = np.random.Generator(np.random.Philox(number)).integers(0, 256, (64, 64, 4), np.uint8)
        Image.fromarray(noise, "RGBA").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    change: dict[str, Any] = {"data": {"alpha_mask": True, "dirs": (str(folder),)}}
    online, cached = (make(config(tmp_path, tmp_path / "cache", where, **change)) for where in ({}, ON_DISK))
    wanted = list(online.batches())
    monkeypatch.setattr(samples, "decode_layers", None)
    for ours, theirs in zip(cached.batches(), wanted, strict=True):
        assert ours.loss_mask is not None and theirs.loss_mask is not None
        assert ours.loss_mask.equal(theirs.loss_mask) and 0 < ours.loss_mask.mean() < 1
        a, b = (each.family.latents(batch, each.parts) for each, batch in ((cached, ours), (online, theirs)))
        assert torch.allclose(a, b, atol=1e-5)


def test_one_folder_in_two_data_sets_is_cached_in_both_sizes(pictures: Path, tmp_path: Path) -> None:
    subset = {"image_dir": str(pictures / "folder"), "flip": True}
    sets = [{"resolution": (size, size), "batch_size": size // 32, "subsets": (subset,)} for size in (64, 96)]
    found = []
    for where in ({}, ON_DISK):
        cfg = config(pictures, tmp_path, where, data={"dirs": (), "datasets": tuple(sets)})
        made = make(cfg)
        plan = make_plan(made.data, cfg, global_batches(cfg, 1))
        last, tokenize = plan.total_steps(1), made.family.tokenizer(made.parts)
        features = made.family.features
        ways = {"dp_rank": 0, "dp_size": 1, "first_step": 0, "last_step": last}
        batches = [each for micro in make_loader(made.data, plan, features, tokenize, cfg, **ways) for each in micro]
        found.append([made.family.latents(batch, made.parts) for batch in batches])
    assert {tuple(each.shape) for each in found[0]} == {(2, 16, 8, 8), (3, 16, 12, 12)}
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


def test_resting_encoders_come_to_the_device_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dataclasses.replace(loaded(), offloaded={"vae"})
    went: list[str] = []
    for name, module in parts.frozen.items():
        monkeypatch.setattr(module, "to", lambda device, name=name: went.append(f"{name} {device}"))
    device = choose("cpu")
    monkeypatch.setattr(device, "torch_device", torch.device("meta"))
    with build.on_device(parts, device):
        assert went == ["vae meta"]
    assert went == ["vae meta", "vae cpu"]
