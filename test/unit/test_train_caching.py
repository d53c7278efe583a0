"""Training from cached features: the very inputs of online training, and nothing stale, missing or too large."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cached import BOTH, ON_DISK, SIZES, config, loaded, make, write_data
from PIL import Image

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, DataFault, MediaRef
from difftrain.data import samples
from difftrain.data.cache import layout
from difftrain.data.cache.places import Folder
from difftrain.data.index import Index
from difftrain.data.loader import make_loader
from difftrain.data.prepare import global_batches, index_folder, make_plan, open_data, prepare
from difftrain.data.validation import validation_batches
from difftrain.device import choose, host
from difftrain.distributed.ranks import Ranks
from difftrain.models.sdxl.family import SDXLFamily
from difftrain.testing.pictures import picture, write_folder, write_tar
from difftrain.train import caching, encoding
from difftrain.train.caching import undecodable

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen pictures."""
    return write_data(tmp_path_factory.mktemp("caching"))


@pytest.fixture(scope="module")
def built(pictures: Path) -> Path:
    """A folder with whole caches of the pictures."""
    make(config(pictures, pictures / "built", ON_DISK))
    return pictures / "built"


def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many samples each call of an encoder gets from now on."""
    calls: list[int] = []
    inner = encoding.items_of

    def items(loader: Any) -> Iterator[Any]:
        for piece in inner(loader):
            calls.append(len(piece.rows))
            yield piece

    monkeypatch.setattr(encoding, "items_of", items)
    return calls


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
    context = choose("cpu").autocast(precision)
    with context:
        wanted = [online.family.inputs(batch, online.parts) for batch in online.batches(2)]
    cached = make(config(pictures, tmp_path, where, **sections))

    def refuse(*_: Any) -> None:
        raise AssertionError("with a cache no picture is decoded")

    monkeypatch.setattr(samples.SampleMaker, "_layers", refuse)
    batches = list(cached.batches(2))
    monkeypatch.setattr(cached.parts.frozen["vae"], "encode", refuse)  # nor is anything encoded
    monkeypatch.setattr(cached.parts.frozen["text_encoder_1"], "forward", refuse)
    assert all({"moments", "hidden_1", "hidden_2", "pooled"} <= batch.features.keys() for batch in batches)
    assert not any({"pixels", "input_ids_1"} & batch.features.keys() for batch in batches)
    assert cached.parts.resting == {"vae", "text_encoder_1", "text_encoder_2"}
    found = [cached.family.inputs(batch, cached.parts) for batch in batches]
    assert len(found) == len(wanted) > 5
    near = {"no": 1e-5, "bf16": 3e-2}[precision]  # other batches round otherwise
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours.x_t, theirs.x_t, atol=1e-5) and ours.timestep.equal(theirs.timestep)
        assert ours.target.equal(theirs.target)
        for name, value in theirs.conditions.items():
            assert ours.conditions[name].dtype == value.dtype
            assert torch.allclose(ours.conditions[name].float(), value.float(), atol=near, rtol=near), name


@pytest.mark.parametrize("one", ["latents", "text"])
def test_each_can_be_cached_alone(pictures: Path, tmp_path: Path, one: str) -> None:
    made = make(config(pictures, tmp_path, {one: True}))
    features = next(made.batches()).features.keys()
    assert ("moments" in features) == ("pixels" not in features) == (one == "latents")
    assert ("hidden_1" in features) == ("input_ids_1" not in features) == (one == "text")
    assert made.parts.resting == ({"vae"} if one == "latents" else {"text_encoder_1", "text_encoder_2"})
    weights = [each for name in made.parts.resting for each in made.parts.frozen[name].parameters()]
    size = encoding.amount(sum(4 * each.numel() for each in weights))
    assert made.parts.notes[-1].endswith(f"they stay on the host, {size} less on the device")


def test_a_flip_is_cached_only_where_it_is_drawn(pictures: Path, tmp_path: Path) -> None:
    both = make(config(pictures, tmp_path, BOTH)).data.store.pictures
    one = make(config(pictures, tmp_path, BOTH, data={"flip": False})).data.store.pictures
    assert both is not None and one is not None
    plain, mirrored = (both.read([3], [each])["moments"] for each in (False, True))
    assert not plain.equal(mirrored) and one.read([3], [False])["moments"].equal(plain)
    assert both.shelf._layout.bytes == 2 * one.shelf._layout.bytes


def test_equal_captions_are_encoded_once(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = encoded(monkeypatch)
    make(config(pictures, tmp_path, {"text": True}))
    assert calls == [len(SIZES) + 5 + 1]  # of the table each its own, and one for all


def test_what_prefix_and_suffix_make_of_captions_is_what_is_encoded(pictures: Path, tmp_path: Path) -> None:
    captions = {"prefix": "one", "suffix": "more", "keep_tokens_separator": "|||", "secondary_separator": ";"}
    cached = make(config(pictures, tmp_path, {"text": True}, captions=captions))
    online, plain = make(config(pictures, tmp_path, captions=captions)), make(config(pictures, tmp_path))
    pairs = zip(cached.batches(), online.batches(), plain.batches(), strict=True)
    for ours, theirs, other in pairs:
        found, wanted, without = (
            made.family.text(batch, made.parts)["hidden_2"]
            for made, batch in ((cached, ours), (online, theirs), (plain, other))
        )
        assert torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(without, wanted, atol=1e-2)


@pytest.mark.flags("vae_batch_size")
def test_the_vae_takes_as_many_pictures_at_once_as_asked(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = encoded(monkeypatch)
    monkeypatch.setattr(layout, "PART_ENTRIES", 5)
    model = {"init_from_config": "tiny"}
    make(config(pictures, tmp_path, {"latents": True}, model=model | {"vae_batch_size": 2}))
    assert set(calls) == {1, 2} and sum(calls) == len(SIZES) + 5  # a part of five is cut into 2, 2 and 1
    calls.clear()
    make(config(pictures, tmp_path, {"latents": True}, model=model))
    assert max(calls) == 3  # the micro batch


def test_a_later_run_reads_what_is_there(pictures: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = encoded(monkeypatch)
    first = make(config(pictures, built, ON_DISK))
    again = make(config(pictures, built, ON_DISK, validation={"split": 0.4}, training={"seed": 5, "batch_size": 1}))
    assert calls == []  # neither split nor seed nor batch size count
    assert first.kept().equal(again.kept()) and again.parts.resting


def parts_of(cfg: TrainConfig, kind: str) -> list[Path]:
    return sorted((index_folder(cfg) / "features").glob(f"{kind}-*/*.part"))


def another_picture(root: Path) -> None:
    (root / "folder" / "0003.png").write_bytes(picture(777, SIZES[3]))


def another_caption(root: Path) -> None:
    (root / "folder" / "0003.txt").write_text("something else")


def one_more(root: Path) -> None:
    write_folder(root / "folder", [(64, 64)], start=50)


@pytest.mark.parametrize(
    ("change", "latents", "text"), [(another_picture, 1, 0), (another_caption, 0, 14), (one_more, 11, 15)]
)
def test_only_parts_that_changed_data_touch_are_encoded_anew(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, latents: int, text: int
) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    before, cfg = config(tmp_path / "data", tmp_path / "cache"), config(tmp_path / "data", tmp_path / "cache", ON_DISK)
    make(cfg)
    change(tmp_path / "data")
    calls = encoded(monkeypatch)
    cached = make(cfg).latents()
    assert sum(calls) == latents + text  # pictures of its bucket; captions fill one part
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(cached, make(before).latents(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"resize_interpolation": "nearest"}},
        {"data": {"flip": False}},
        {"data": {"alpha_mask": True}},
        {"data": {"bucket_reso_steps": 64}},
        {"training": {"mixed_precision": "bf16"}},
        {"model": {"init_from_config": "tiny", "clip_skip": 1}},
        {"model": {"init_from_config": "tiny", "max_token_length": 150}},
    ],
)
def test_another_way_to_encode_never_meets_a_stale_entry(
    pictures: Path, built: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    calls = encoded(monkeypatch)
    cached, online = (make(config(pictures, built, where, **change)) for where in (ON_DISK, {}))
    assert calls
    precision = cached.cfg.training.mixed_precision
    near = 1e-5 if precision == "no" else 3e-2
    for ours, theirs in zip(cached.batches(), online.batches(), strict=True):
        with choose("cpu").autocast(precision):
            a, b = (each.family.inputs(batch, each.parts) for each, batch in ((cached, ours), (online, theirs)))
        assert torch.allclose(a.x_t, b.x_t, atol=1e-5)
        assert torch.allclose(a.conditions["hidden_1"].float(), b.conditions["hidden_1"].float(), atol=near, rtol=near)


def test_other_weights_under_the_same_name_are_noticed(
    pictures: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = encoded(monkeypatch)
    parts = SDXLFamily(config(pictures, built)).load()
    with torch.no_grad():
        next(iter(parts.frozen["vae"].encoder.parameters())).view(-1)[0] += 1e-3
    make(config(pictures, built, ON_DISK), parts)
    assert sum(calls) == len(SIZES) + 5  # the pictures, and no caption


def test_a_build_that_was_killed_goes_on_with_what_is_whole(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(pictures, tmp_path, ON_DISK)
    wanted = make(config(pictures, tmp_path, BOTH)).kept()
    child = os.fork()
    if not child:
        commit = Folder.commit

        def then_die(*args: Any) -> None:
            commit(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        Folder.commit = then_die  # type: ignore[method-assign]
        make(cfg)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (whole,) = parts_of(cfg, "*")
    written = whole.stat().st_mtime_ns
    calls = encoded(monkeypatch)
    assert make(cfg).kept().equal(wanted) and whole.stat().st_mtime_ns == written
    assert 0 < sum(calls) < 13 + 14


def test_pictures_of_tars_are_encoded_tar_by_tar(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / "tars" / f"{number}.tar", [(64, 64)] * 6, start=10 * number)
    cfg = config(tmp_path, tmp_path / "cache", {"latents": True}, data={"dirs": (str(tmp_path / "tars"),)})
    data, family = open_data(cfg, prepare(cfg, log=lambda line: None)), SDXLFamily(cfg)
    (job,) = caching.asked_for(cfg, family, loaded(), data)
    (part,) = job.work.layout.parts
    assert part.count == 18
    ids = job.work._ids.tolist()  # type: ignore[union-attr]
    shards = [int(data.index.columns().shard[each]) for each in ids]
    assert shards == [0] * 6 + [1] * 6 + [2] * 6 and sorted(ids) != ids


def test_a_rank_leaves_its_work_where_another_has_failed(pictures: Path, tmp_path: Path) -> None:
    cfg = config(pictures, tmp_path, {"latents_to_disk": True})
    data, family, parts = open_data(cfg, prepare(cfg, log=lambda line: None)), SDXLFamily(cfg), loaded()
    (job,) = caching.asked_for(cfg, family, parts, data)
    caching._find_place(cfg, Ranks(), parts, job)
    job.missing = list(job.work.layout.parts)
    stop = threading.Event()
    stop.set()
    encoding.encode(job, choose("cpu"), "no", parts, 0, stop)
    assert not parts_of(cfg, "*")
    encoding.encode(job, choose("cpu"), "no", parts, 0, threading.Event())
    assert len(parts_of(cfg, "*")) == len(job.missing)


@pytest.mark.flags("skip_cache_check")
def test_damaged_parts_are_named_and_encoded_anew(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(pictures, tmp_path, ON_DISK)
    good = make(cfg).kept()
    bent, cut, gone, *_ = parts_of(cfg, "latents")
    data = bytearray(bent.read_bytes())
    data[3] ^= 64  # of the first number's exponent
    bent.write_bytes(data)
    calls = encoded(monkeypatch)
    trusting = make(config(pictures, tmp_path, ON_DISK | {"skip_check": True}))
    assert not calls and (trusting.kept() != good).sum() == 1
    with cut.open("r+b") as file:
        file.truncate(100)
    gone.unlink()
    with caplog.at_level(logging.WARNING):
        found = make(cfg).kept()
    assert calls and found.equal(good)
    assert bent.name in caplog.text and cut.name in caplog.text and "checksum" in caplog.text
    calls.clear()
    make(cfg)
    assert not calls


def test_what_can_no_longer_be_decoded_is_replaced_as_online(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    file = tmp_path / "data" / "folder" / "0000.png"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255  # its header and its end are sound
    file.write_bytes(data)
    quick = {"data": {"verify": "quick"}, "validation": {"split": 0.2}}
    online, cached, on_disk, again = (
        make(config(tmp_path / "data", tmp_path, where, **quick)) for where in ({}, BOTH, ON_DISK, ON_DISK)
    )
    batches = [list(made.batches()) for made in (online, cached, on_disk, again)]
    named = {reject.path for batch in batches[0] for reject in batch.rejects}
    assert named == {str(file)}
    for others in batches[1:]:
        for ours, theirs in zip(others, batches[0], strict=True):
            assert ours.rejects == theirs.rejects and ours.record_id.equal(theirs.record_id)
    assert not undecodable(online.data)
    for made in (cached, on_disk, again):
        assert {reject.path for reject in undecodable(made.data)} == named
        assert "broken" in undecodable(made.data)[0].reason


def test_a_disk_that_failed_once_is_asked_again_at_the_next_start(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, read = config(pictures, tmp_path, {"latents_to_disk": True}), Index.read

    def failing(index: Index, media: MediaRef) -> bytes:
        if media.path.endswith("0001.png"):
            raise OSError(errno.EIO, "the disk fails")
        return read(index, media)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "read", failing)
        (reject,) = undecodable(make(cfg).data)
    assert reject.path.endswith("0001.png") and "the disk fails" in reject.reason
    calls = encoded(monkeypatch)
    assert not undecodable(make(cfg).data) and calls == [2]  # the pictures of its bucket
    assert make(cfg).kept().equal(make(config(pictures, tmp_path, {"latents": True})).kept())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_goes_during_the_run_is_named_by_validation_too(
    pictures: Path, tmp_path: Path, workers: int
) -> None:
    made = make(config(pictures, tmp_path, ON_DISK, data={"workers": workers}, validation={"split": 0.4}))
    for part in parts_of(made.cfg, "*"):
        part.unlink()
    tokenize, features = made.family.tokenizer(made.parts), made.family.features
    with pytest.raises(DataFault, match="can no longer be read") as caught:
        list(validation_batches(made.data, tokenize, features, made.cfg, 0, 1, local_size=1))
    assert "Traceback" not in str(caught.value)


def test_too_many_broken_pictures_stop_the_run(pictures: Path, tmp_path: Path) -> None:
    shutil.copytree(pictures, tmp_path / "data")
    for file in (tmp_path / "data" / "folder").glob("*.png"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(data)
    cfg = config(tmp_path / "data", tmp_path, {"latents": True}, data={"verify": "quick"})
    with pytest.raises(DataFault, match=r"8 of 13 pictures cannot be decoded \(--max_rejected_share=0.5\), .*broken"):
        make(cfg)


@pytest.mark.parametrize("where", [BOTH, ON_DISK])
def test_what_does_not_fit_is_refused_before_anything_is_encoded(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any]
) -> None:
    calls = encoded(monkeypatch)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigFault) as caught:
        make(config(pictures, tmp_path, where))
    said = str(caught.value)
    assert not calls and len(caught.value.faults) == 2 and "KiB" in said and "are free" in said
    assert ("--cache_latents_to_disk: needs" in said) == ("--cache_dir" in said) == (where == ON_DISK)
    assert (
        ("--cache_latents: needs" in said) == ("--cache_latents_to_disk keeps it in files" in said) == (where == BOTH)
    )


def test_the_size_is_said_before_anything_is_encoded(
    pictures: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        make(config(pictures, tmp_path, {"latents": True}))
        make(config(pictures, tmp_path, ON_DISK))
    cells = 10 * 8 * 8 + 2 * 4 * 12 + 1 * 12 * 4
    total = 2 * 2 * 16 * cells * 4 / 1024  # flips, moments, channels, fp32
    said = f"cache of latents: 13 pictures of {total / 13:.4g} KiB on average, {total:.4g} KiB"
    assert caplog.text.count(said) == 2
    assert "of this machine's memory, of" in caplog.text and "of it to be encoded" in caplog.text
    assert str(index_folder(config(pictures, tmp_path)) / "features") in caplog.text


def test_masks_come_from_the_picture_also_where_its_latents_are_cached(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(4):
        noise = np.random.Generator(np.random.Philox(number)).integers(0, 256, (64, 64, 4), np.uint8)
        Image.fromarray(noise, "RGBA").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    (tmp_path / "table").mkdir()
    change: dict[str, Any] = {"data": {"alpha_mask": True, "dirs": (str(folder),)}}
    online, cached = (make(config(tmp_path, tmp_path / "cache", where, **change)) for where in ({}, BOTH))
    for ours, theirs in zip(cached.batches(), online.batches(), strict=True):
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


def test_a_mask_in_a_file_is_read_at_every_use_and_never_for_the_latents(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", [(64, 64)] * 4)
    masks = tmp_path / "masks"
    masks.mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 0, 0)).save(masks / f"{number:04d}.png")
    data = {"dirs": (str(tmp_path / "folder"),), "conditioning_dir": str(masks)}
    cfg = config(tmp_path, tmp_path / "cache", {"latents_to_disk": True}, data=data, loss={"masked": True})
    made = make(cfg)
    shades = {float(mask.max()) for batch in made.batches(2) for mask in batch.loss_mask}  # type: ignore[union-attr]
    assert shades == {float(np.float32(60 * number) / np.float32(255)) for number in range(4)}
    kept = parts_of(cfg, "latents")
    plain = config(tmp_path, tmp_path / "cache", {"latents_to_disk": True}, data={"dirs": data["dirs"]})
    make(plain)
    assert [path.name for path in parts_of(plain, "latents")] == [path.name for path in kept]


def test_resting_encoders_come_to_the_device_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dataclasses.replace(loaded(), resting={"vae"})
    went: list[str] = []
    for name, module in parts.frozen.items():
        monkeypatch.setattr(module, "to", lambda device, name=name: went.append(f"{name} {device}"))
    device = choose("cpu")
    monkeypatch.setattr(device, "torch_device", torch.device("meta"))
    with caching.awake(parts, device):
        assert went == ["vae meta"]
    assert went == ["vae meta", "vae cpu"]
