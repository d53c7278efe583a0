"""An encoder that reads pictures together with their captions: which pairs are wanted, encoded, and read in training."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_runs import GLOBAL, IN_MEMORY, ON_DISK, batches, cached, config, losses, opened

from difftrain.cache import encoding
from difftrain.cache.decoding import DecodingDataset
from difftrain.cache.manifest.manifest import FACTS, CacheManifest, ManifestRequest
from difftrain.cache.request import build_manifests, cache_requests, estimate_storage
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.references import all_references
from difftrain.config import TrainConfig
from difftrain.contracts import CAPTION, PAIR, Bucket, ConfigFault, DataFault, Encoder, Feature, TrainingFault
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.prepare import open_data, prepare
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.testing.clips import CELL, FROZEN, LENGTH, WIDTH, ClipFamily, Words
from difftrain.testing.pictures import picture, write_folder
from difftrain.testing.spawn import run_ranks

SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (64, 64), (96, 40), (64, 66)]
COUNT = len(SIZES)
TWO = {"shuffle": True, "dropout_rate": 0.3}  # captions in two variants each, and dropped
TEXT = {"text_to_disk": True}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "pictures", SIZES)
    for number in range(COUNT):
        (folder / f"{number:04d}.txt").write_text(f"number {number}, " + ", ".join("abcdefgh"))
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs each call of the encoder gets."""
    calls: list[int] = []
    described = ClipFamily.encoders

    def counting(family: ClipFamily, parts: Any) -> dict[str, Encoder]:
        found = described(family, parts)
        encode = found["reader"].encode

        def counted(batch: Any) -> Any:
            calls.append(len(batch.keys))
            return encode(batch)

        return found | {"reader": _with(found["reader"], encode=counted)}

    monkeypatch.setattr(ClipFamily, "encoders", counting)
    return calls


def _with(encoder: Encoder, **changes: Any) -> Encoder:
    fields = {name: getattr(encoder, name) for name in encoder.__dataclass_fields__}
    return Encoder(**fields | changes)


def wanted_of(cfg: TrainConfig, **more: Any) -> tuple[Any, CacheManifest]:
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    family = ClipFamily(seed=1)
    (wish,) = [each for each in cache_requests(cfg, family, family.load(meta=True), data) if each.name == "reader"]  # type: ignore[arg-type]
    return data, CacheManifest(
        build_manifests(data, [wish.manifest_request("of")], Words(), log=lambda line: None, **more)["reader"]
    )


def addresses(wanted: CacheManifest) -> set[bytes]:
    return {each.tobytes() for each in wanted.addresses}


# ------------------------------------------------------------------ which pairs


def test_every_cut_is_wanted_beside_every_caption(pictures: Path) -> None:
    _, wanted = wanted_of(pairs_config(pictures))
    assert wanted.source == PAIR and wanted.count == COUNT * 2 * (2 + 1) == len(wanted.references)
    assert sorted(wanted.buckets()) == wanted.buckets() and sum(count for _, count in wanted.buckets()) == wanted.count
    keys, variants = wanted.references["key"], wanted.references["variant"].tolist()
    assert keys.tobytes() == b"".join(sorted(each.tobytes() for each in keys)) and variants == list(range(6)) * COUNT
    for n in range(wanted.batches):
        rows, _ = wanted.take(wanted.rows(n))
        assert len({int(each) for each in rows["record"]}) <= 2  # a picture is decoded once for its neighbours


def test_what_is_made_ready_are_pictures_and_the_tokens_of_their_captions(pictures: Path) -> None:
    data, wanted = wanted_of(config(pictures, ON_DISK))
    found: dict[tuple[str, bool], list[str]] = {}
    for n in range(wanted.batches):
        piece = DecodingDataset(data, wanted, Words())[n]
        assert not isinstance(piece, DataFault) and piece.batch is not None
        batch, (rows, _) = piece.batch, wanted.take(piece.rows)
        assert batch.bucket == wanted.bucket(n) and list(batch.keys) == [
            addresses_of(wanted, row) for row in piece.rows
        ]
        captions = [meta["caption"] for meta in piece.metas]
        assert batch.features["t5_ids"].equal(Words()(captions)["t5_ids"])
        for place, row in enumerate(rows):
            record = data.index.record(int(row["record"]))
            number, flip = int(row["variant"]) >> 1, bool(row["variant"] & 1)
            assert captions[place] == ("" if number == 0 else record.captions[0])
            found.setdefault((record.name, flip), []).append(captions[place])
            if record.size_hw == (64, 64):
                whole = torch.from_numpy(decoded(pictures.parent / record.name))
                assert batch.features["pixels"][place].equal(whole.flip(-1) if flip else whole)
    assert len(found) == 2 * COUNT and all(len(each) == 2 and "" in each for each in found.values())


def addresses_of(wanted: CacheManifest, row: int) -> bytes:
    return bytes(wanted.addresses[row].tobytes())


def decoded(path: Path) -> np.ndarray:
    from PIL import Image

    return np.ascontiguousarray(np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1))


def test_captions_that_are_never_dropped_and_pictures_that_stay_as_they_are_make_one_pair(pictures: Path) -> None:
    _, wanted = wanted_of(config(pictures, ON_DISK, data={"flip": False}, captions={}))
    assert wanted.count == COUNT and set(wanted.references["variant"].tolist()) == {2}


def test_held_out_records_are_neither_mirrored_nor_dropped(pictures: Path) -> None:
    cfg = config(pictures, ON_DISK | {"shuffle_num": 2}, captions=TWO, validation={"split": 0.3, "seed": 2})
    data, wanted = wanted_of(cfg)
    held = sum(rows.records for rows in data.tables.validation)
    assert held and wanted.count == held + (COUNT - held) * 6
    assert len(wanted.entries[wanted.entries["plain"] == 1]) == held


@pytest.mark.parametrize("change", ["a caption", "a picture"])
def test_only_the_pairs_of_what_changed_are_new(pictures: Path, change: str) -> None:
    _, before = wanted_of(config(pictures, ON_DISK))
    if change == "a caption":
        (pictures / "0003.txt").write_text("quite another one")
    else:
        (pictures / "0003.png").write_bytes(picture(99, SIZES[3]))
    os.utime(pictures / ("0003.txt" if change == "a caption" else "0003.png"), ns=(5, 5))
    _, after = wanted_of(config(pictures, ON_DISK))
    fresh = addresses(after) - addresses(before)
    # two cuts of the picture, each beside one caption that changed; and beside the empty one, where the picture did
    assert len(fresh) == len(addresses(before) - addresses(after)) == (2 if change == "a caption" else 4)


def test_a_pair_is_none_of_an_encoder_of_pictures_or_captions_alone(pictures: Path) -> None:
    data, pairs = wanted_of(config(pictures, ON_DISK))
    made = {}
    for name, source in (("pictures", {"pixels"}), ("captions", {"caption"})):
        encoder = Encoder(frozenset(source), {"made": Feature(4)}, (), "", lambda batch: {}, lambda: "of")
        asked = ManifestRequest(name, encoder, "of", pairs.storage, 4)
        made |= build_manifests(data, [asked], Words(), log=lambda line: None)
    others = addresses(CacheManifest(made["pictures"])) | addresses(CacheManifest(made["captions"]))
    assert not addresses(pairs) & others


def test_a_list_of_before_there_were_pairs_says_what_it_is_of_by_its_files(pictures: Path) -> None:
    data, _ = wanted_of(config(pictures, ON_DISK))
    for source in ({"pixels"}, {"caption"}):
        encoder = Encoder(frozenset(source), {"made": Feature(4)}, (), "", lambda batch: {}, lambda: "of")
        folder = build_manifests(data, [ManifestRequest("old", encoder, "of", "", 4)], Words(), log=lambda line: None)[
            "old"
        ]
        facts = json.loads((folder / FACTS).read_text())
        assert facts.pop("source") == sorted(source)
        (folder / FACTS).write_text(json.dumps(facts))
        assert CacheManifest(folder).source == source


def test_an_encoder_of_nothing_known_is_none() -> None:
    for source in (frozenset(), frozenset("pixels"), frozenset({"sound"})):
        with pytest.raises(ValueError, match=r"an .*reads one of pixels, caption, caption.pixels, control"):
            Encoder(source, {}, (), "", lambda batch: {}, lambda: "")  # type: ignore[arg-type]


def test_rows_of_cells_come_with_the_bucket() -> None:
    rows, mask = Feature(8, length=5, per_cell=28), Feature(5, per_cell=28, dtype="uint8")
    assert rows.shape(Bucket(56, 84)) == (5 + 2 * 3, 8) and mask.shape(Bucket(56, 84)) == (5 + 2 * 3,)
    assert rows.shape(Bucket(55, 27)) == (5, 8)


# ------------------------------------------------------------------ training


@pytest.mark.parametrize(
    ("cache", "reads_pixels"),
    [(ON_DISK, False), (IN_MEMORY, False), ({"latents": True}, True), (TEXT, True)],
    ids=["all on disk", "all in memory", "latents alone", "text alone"],
)
def test_what_is_cached_of_them_trains_as_online(pictures: Path, cache: dict[str, Any], reads_pixels: bool) -> None:
    family, more = ClipFamily(seed=1), {"captions": TWO}
    plain = config(pictures, {"shuffle_num": 2}, **more)
    wanted = losses(plain, family, online := family.load(), opened(plain, online))
    cfg = config(pictures, cache | {"shuffle_num": 2}, **more)
    data = opened(cfg, parts := family.load())
    (first,), *_ = list(batches(cfg, family, parts, data))
    assert ("pixels" in first.features) == reads_pixels
    assert ("seen" in first.features) == any("text" in name for name in cache)
    if "seen" in first.features:
        cells = (first.bucket.height // CELL) * (first.bucket.width // CELL)
        assert cells and first.features["seen"].shape == (GLOBAL, cells + LENGTH, WIDTH)
        assert first.features["seen_mask"].shape == (GLOBAL, cells + LENGTH)
        assert not first.features["seen"][first.features["seen_mask"] == 0].any()
    assert losses(cfg, family, parts, data) == pytest.approx(wanted, rel=1e-6) and len(set(wanted)) > 5


def test_held_out_pairs_are_those_of_online_validation(pictures: Path) -> None:
    family, more = ClipFamily(seed=1), {"captions": TWO, "validation": {"split": 0.3, "seed": 2}}
    plain, cfg = (config(pictures, cache | {"shuffle_num": 2}, **more) for cache in ({}, ON_DISK))
    online, parts = family.load(), family.load()
    found = []
    for each, own in ((plain, online), (cfg, parts)):
        held = held_out_set(each, opened(each, own)).batches(family.tokenizer(own), family.features)
        found.append([family.inputs(batch, own) for batch in held])
    assert found[0] and len(found[0]) == len(found[1])
    for theirs, ours in zip(*found, strict=True):
        for name, value in theirs.conditions.items():
            assert torch.allclose(ours.conditions[name].float(), value.float(), atol=1e-6), name


def rank(pictures: str, out: str) -> None:
    """Build and train on one of several ranks."""
    torch.set_num_threads(1)
    cfg, family = pairs_config(Path(pictures)), ClipFamily(seed=1)
    with Ranks.open(Launch.from_environment(), choose("cpu"), 1.0) as ranks:
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"batch_size": GLOBAL // ranks.size})})
        data = opened(cfg, parts := family.load(deferred=FROZEN), ranks)
        torch.save(losses(cfg, family, parts, data, ranks), Path(out) / f"{ranks.rank}.pt")


def pairs_config(pictures: Path) -> TrainConfig:
    return config(pictures, ON_DISK | {"shuffle_num": 2, "batch_size": 4}, captions=TWO)


def test_two_ranks_build_and_train_as_one(pictures: Path, tmp_path: Path) -> None:
    family, plain = ClipFamily(seed=1), config(pictures, {"shuffle_num": 2}, captions=TWO)
    wanted = losses(plain, family, parts := family.load(), opened(plain, parts))
    paths = os.pathsep.join(str(Path(__file__).parents[1] / each) for each in ("support", "../library"))
    run_ranks(2, f"{__file__}::rank", pictures, tmp_path, env={"PYTHONPATH": paths}, timeout_s=120)
    sums = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2)]
    assert sums[0] == sums[1] == pytest.approx(wanted, rel=1e-6)


# ------------------------------------------------------------------ starts


def test_a_build_that_was_interrupted_goes_on_and_a_whole_one_wakes_nothing(
    pictures: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, family = pairs_config(pictures), ClipFamily(seed=1)
    commit, done = encoding._write_batch, threading.Event()

    def fails_late(job: Any, *rest: Any) -> None:
        commit(job, *rest)
        if job.request.name == "reader" and len(seen) >= 3:
            done.set()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(encoding, "_write_batch", fails_late)
    with pytest.raises((OSError, TrainingFault)):
        opened(cfg, family.load())
    assert done.is_set()
    first, total = sum(seen), COUNT * 6
    assert 0 < first < total
    monkeypatch.setattr(encoding, "_write_batch", commit)
    seen.clear()
    opened(cfg, family.load())
    assert total - first <= sum(seen) < total
    seen.clear()
    parts = family.load(deferred=FROZEN)
    opened(cfg, parts)
    assert not seen and not any(map(parts.is_loaded, FROZEN))
    (use,) = all_references(CacheFolder.open(pictures.parent / "cache"))
    assert use.complete and len(use.rows("reader")) == total


def test_what_is_foreseen_is_what_is_wanted(pictures: Path) -> None:
    cfg, family = pairs_config(pictures), ClipFamily(seed=1)
    data, wanted = wanted_of(cfg)
    (wish,) = [each for each in cache_requests(cfg, family, family.load(meta=True), data) if each.name == "reader"]  # type: ignore[arg-type]
    assert wish.field == "cache.text" and estimate_storage(wish, data).entries == wanted.count


# ------------------------------------------------------------------ bad input


def break_it(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes(len(whole) - 212) + whole[-12:])


def change_it(path: Path) -> None:
    path.write_bytes(picture(77, SIZES[2]))


@pytest.mark.parametrize("harm", [break_it, change_it])
def test_a_picture_that_cannot_be_read_has_another_stand_in_for_its_pairs(
    pictures: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, family = config(pictures, TEXT, data={"verify": "quick", "max_rejected_share": 0.5}), ClipFamily(seed=1)
    parts, path = family.load(), pictures / "0002.png"
    prepare(cfg, log=lambda line: None)
    if harm is break_it:
        harm(path)  # an index that looks quickly does not notice
        os.utime(path, ns=(5, 5))
    else:  # between the listing and the encoding
        encode, once = encoding.encode, [harm]
        monkeypatch.setattr(encoding, "encode", lambda *a, **k: (once and once.pop()(path), encode(*a, **k))[1])
    found = cached(cfg, parts)
    assert [Path(each.path).name for each in found.rejects] == ["0002.png"]
    records = [found.data.index.record(i).name for i in range(found.data.index.count)]
    for (batch,) in batches(cfg, family, parts, found.data):
        assert records.index("pictures/0002.png") not in batch.record_id.tolist()


@pytest.mark.parametrize("way", ["random_crop", "color_aug"])
def test_pictures_that_differ_at_every_use_cannot_be_kept_in_pairs(pictures: Path, way: str) -> None:
    cfg, family = config(pictures, TEXT, data={way: True}), ClipFamily(seed=1)
    with pytest.raises(ConfigFault) as caught:
        opened(cfg, family.load())
    (fault,) = caught.value.faults
    assert fault.where == f"--{way}" and fault.what.split()[0] == "contradicts" and " reader " in fault.what


def test_a_list_of_other_captions_is_named(pictures: Path) -> None:
    data, wanted = wanted_of(config(pictures, ON_DISK))
    with pytest.raises(DataFault, match=r"/wanted-reader-\w+: .* captions "):
        raise DecodingDataset(data, wanted, lambda captions: Words()([each[::-1] + " x" for each in captions]))[0]  # type: ignore[misc]


def test_more_captions_than_can_be_counted_are_named(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.cache.manifest.pictures._MAX_VARIANT", 3)
    with pytest.raises(DataFault, match=r"[0-9]{4}\.png has 1 captions; .* 0$"):
        wanted_of(config(pictures, ON_DISK))
    assert CAPTION < PAIR
