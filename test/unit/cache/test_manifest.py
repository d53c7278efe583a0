"""What is wanted of each encoder: every entry once, under an address that changes with what it is made of, and ready."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from difftrain.cache.decoding import DecodingDataset
from difftrain.cache.manifest import content_hash
from difftrain.cache.manifest.address import MASKS, as_array
from difftrain.cache.manifest.manifest import AddressByRecord, CacheManifest, ManifestRequest, first_occurrences
from difftrain.cache.request import build_manifests, mask_encoder
from difftrain.config import TrainConfig
from difftrain.contracts import CAPTION, PIXELS, Bucket, DataFault, Draw, Encoder, Feature, FeatureSpec
from difftrain.data.index.inspection import PASSING, content_of
from difftrain.data.media.media import Unusable
from difftrain.data.prepare import open_data, prepare
from difftrain.data.samples import SampleMaker, captions_of
from difftrain.testing.pictures import write_folder, write_tar

SIZES = [(64, 64), (64, 64), (96, 40), (70, 60), (40, 96), (64, 64), (128, 128), (90, 40)]
FEATURES = FeatureSpec(features={}, draws={})


def tokenize(captions):
    """Stand in for a tokenizer: the text itself in one feature, and something that no encoder reads."""
    rows = [list(text.encode()[:60].ljust(60)) for text in captions]
    return {"input_ids_1": torch.tensor(rows), "unread": torch.arange(len(captions))}


def encoder(source, **more):
    feature = Feature(4, factor=8) if source == PIXELS else Feature(4)
    return Encoder(source, {"made": feature}, (), "", lambda batch: {}, lambda: "fingerprint", **more)


PICTURES = ManifestRequest("latents", encoder(PIXELS), "vae 1", "fp32", 4)
TEXT = ManifestRequest("text_encoder_1", encoder(CAPTION, inputs=("input_ids_1",)), "te 1", "fp32", 4)


def config(root, *dirs, **sections):
    data = {
        "dirs": tuple(map(str, dirs)),
        "resolution": (64, 64),
        "enable_bucket": True,
        "min_bucket_reso": 32,
        "max_bucket_reso": 128,
        "bucket_reso_steps": 32,
        "cache_dir": str(root / "cache"),
    } | sections.pop("data", {})
    return TrainConfig.model_validate({"data": data, "training": {"seed": 1}} | sections)


def opened(cfg):
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def listed(data, *asked, look=True, tokens=tokenize):
    made = build_manifests(data, asked, tokens, look=look, log=lambda line: None)
    found = [CacheManifest(made[each.name]) for each in asked]
    return found[0] if len(found) == 1 else found


def pieces_of(data, wanted):
    decoding = pickle.loads(
        pickle.dumps(DecodingDataset(data, wanted, tokenize))
    )  # as a worker that is spawned gets it
    assert len(decoding) == wanted.batches and decoding.forks
    return [decoding[n] for n in range(wanted.batches)]


@pytest.fixture
def data(tmp_path):
    return opened(config(tmp_path, write_folder(tmp_path / "a", SIZES)))


def addresses_of(wanted):
    return [each.tobytes() for each in wanted.addresses]


def test_every_picture_is_wanted_once_bucket_by_bucket(data):
    wanted = listed(data, PICTURES)
    assert wanted.count == len(SIZES) and len(set(addresses_of(wanted))) == wanted.count
    assert sum(count for _, count in wanted.buckets()) == wanted.count and wanted.buckets() == sorted(wanted.buckets())
    rows = [row for n in range(wanted.batches) for row in wanted.rows(n)]
    assert rows == list(range(wanted.count))
    assert [wanted.batch_of(row) for row in rows] == [n for n in range(wanted.batches) for _ in wanted.rows(n)]
    assert all(len(wanted.rows(n)) <= 4 for n in range(wanted.batches))
    with pytest.raises(IndexError, match=f"there are {wanted.batches}"):
        wanted.rows(wanted.batches)


def test_what_is_made_ready_is_what_training_sees(data):
    wanted = listed(data, PICTURES)
    maker = SampleMaker(data.index, tuple(r.plain() for r in data.recipes), FEATURES, tokenize, 0)
    for piece in pieces_of(data, wanted):
        assert piece.batch.bucket == wanted.bucket(piece.number) and not piece.rejected and not piece.passed
        assert list(piece.batch.keys) == [wanted.addresses[row].tobytes() for row in piece.rows]
        for i, record_id in enumerate(piece.batch.record_id.tolist()):
            record = data.index.record(record_id)
            sample = maker.sample(record, Draw(record.id, record.key, 0), 0)
            assert np.array_equal(piece.batch.features["pixels"][i].numpy(), sample.pixels)
            assert piece.metas[i] == {"name": record.name}


@pytest.mark.flags("flip_aug")
def test_a_picture_that_may_be_flipped_is_wanted_in_both_forms(tmp_path):
    a, b = write_folder(tmp_path / "a", SIZES), write_folder(tmp_path / "b", SIZES[:3], start=50)
    one = opened(config(tmp_path, a, b))
    both = opened(config(tmp_path, a, b, data={"flip": True}))
    as_is, flipped = listed(one, PICTURES), listed(both, dataclasses.replace(PICTURES, batch_size=3))
    assert flipped.count == 2 * as_is.count and flipped.batch_size == 4
    assert set(addresses_of(as_is)) < set(addresses_of(flipped))  # the ones as they are are not encoded anew
    for piece in pieces_of(both, flipped):
        pixels = piece.batch.features["pixels"]
        assert torch.equal(pixels[0::2].flip(-1), pixels[1::2])
    places, ids = AddressByRecord(flipped.folder), list(range(both.index.count))
    for flip in (False, True):
        found = places.addresses(ids, [flip] * len(ids))
        assert len(set(found)) == len(ids) and set(found) <= set(addresses_of(flipped))
    assert places.addresses(ids, [False] * len(ids)) == AddressByRecord(as_is.folder).addresses(ids, [False] * len(ids))


def test_equal_pictures_are_one_entry_also_of_other_data_sets(tmp_path):
    a = write_folder(tmp_path / "a", SIZES)
    shutil.copytree(a, tmp_path / "b")
    tar = write_tar(tmp_path / "c" / "1.tar", SIZES)
    one, all_ = opened(config(tmp_path, a)), opened(config(tmp_path, a, tmp_path / "b", tar.parent))
    first, second = listed(one, PICTURES), listed(all_, PICTURES)
    assert all_.index.count == 3 * one.index.count
    assert set(addresses_of(first)) == set(addresses_of(second)) and second.count == first.count
    assert len(second.references) == all_.index.count


def test_uses_name_every_record_and_variant_by_key(tmp_path):
    cfg = config(tmp_path, write_folder(tmp_path / "a", SIZES), data={"flip": True}, captions={"shuffle": True},
                 cache={"shuffle_num": 3})  # fmt: skip
    data = opened(cfg)
    pictures, text = listed(data, PICTURES, TEXT)
    keys = data.index.columns().keys
    for wanted, variants in ((pictures, 2), (text, 3)):
        uses = wanted.references if wanted is pictures else wanted.references[1:]
        assert uses["key"].tobytes() == np.repeat(np.asarray(keys), variants, axis=0).tobytes()
        assert uses["variant"].tolist() == list(range(variants)) * len(keys)
        assert {each.tobytes() for each in wanted.references["address"]} == set(addresses_of(wanted))
    assert text.references[0]["key"].tobytes() == bytes(16)


def test_an_address_changes_with_what_decides_the_pixels(tmp_path):
    folder = write_folder(tmp_path / "a", SIZES)
    before = set(addresses_of(listed(opened(config(tmp_path, folder)), PICTURES)))
    for more in ({"resize_interpolation": "nearest"}, {"alpha_mask": True}):
        other = set(addresses_of(listed(opened(config(tmp_path, folder, data=more)), PICTURES)))
        assert len(other) == len(before) and not other & before
    finer = set(addresses_of(listed(opened(config(tmp_path, folder, data={"bucket_reso_steps": 16})), PICTURES)))
    assert finer != before and finer & before  # those whose bucket stays are not encoded anew
    for other in (dataclasses.replace(PICTURES, **{field: "x"}) for field in ("fingerprint", "storage")):
        assert not set(addresses_of(listed(opened(config(tmp_path, folder)), other))) & before


def test_a_list_is_made_once_and_again_when_anything_changes(tmp_path):
    folder, calls = write_folder(tmp_path / "a", SIZES), []

    def counted(captions):
        calls.append(len(captions))
        return tokenize(captions)

    counted.identity = "counted"
    cfg = config(tmp_path, folder)
    first = listed(opened(cfg), PICTURES, TEXT, tokens=counted)
    assert sum(calls) == len(SIZES) + 1
    again = listed(opened(cfg), PICTURES, TEXT, tokens=counted)
    assert [w.folder for w in first] == [w.folder for w in again] and sum(calls) == len(SIZES) + 1
    counted.identity = "another"
    listed(opened(cfg), TEXT, tokens=counted)
    assert sum(calls) == 2 * (len(SIZES) + 1)
    (folder / "0003.txt").write_text("another caption")
    before = [set(addresses_of(each)) for each in first]
    after = [set(addresses_of(w)) for w in listed(opened(cfg), PICTURES, TEXT)]
    assert before[0] == after[0]  # a caption that is edited leaves latents alone
    assert len(before[1] - after[1]) == len(after[1] - before[1]) == 1
    (folder / "0001.png").unlink()
    fewer = [set(addresses_of(w)) for w in listed(opened(cfg), PICTURES, TEXT)]
    assert [len(a - b) for a, b in zip(after, fewer, strict=True)] == [1, 1] and fewer[0] < after[0]


def test_an_index_that_did_not_read_all_bytes_gives_the_same_addresses(tmp_path):
    folder = write_folder(tmp_path / "a", SIZES)
    tar = write_tar(tmp_path / "b" / "1.tar", SIZES, start=20)
    full = listed(opened(config(tmp_path, folder, tar.parent, data={"verify": "full"})), PICTURES)
    cfg = config(tmp_path / "other", folder, tar.parent, data={"verify": "quick"})
    data = opened(cfg)
    assert data.index.record(0).content is None
    assert addresses_of(listed(data, PICTURES)) == addresses_of(full)


def test_bytes_are_read_once_for_a_path_size_and_time(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "a", SIZES)
    cfg, read = config(tmp_path, folder, data={"verify": "quick"}), []
    monkeypatch.setattr(
        "difftrain.cache.manifest.content_hash.content_of", lambda data: read.append(1) or content_of(data)
    )
    listed(opened(cfg), PICTURES)
    assert len(read) == len(SIZES)
    listed(opened(cfg), PICTURES)
    write_folder(folder, SIZES[:1], start=99)  # the index is built anew, and what is known is carried over
    data = opened(cfg)
    listed(data, PICTURES)
    assert len(read) == len(SIZES) + 1 and data.index.count == len(SIZES) + 1
    (data.index.folder / "content.npy").unlink()
    older, torn = sorted((data.index.folder.parent / "contents").glob("*.rows"), key=lambda path: path.stat().st_size)
    older.unlink()
    with torn.open("r+b") as file:
        file.seek(50)
        file.write(b"?")  # of the second row
        file.truncate(torn.stat().st_size - 1)
    listed(data, PICTURES)
    assert len(read) == len(SIZES) + 3  # what is damaged or torn is read again, and only that


def test_two_that_read_at_once_take_over_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(content_hash, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(content_hash, "_CHUNK", 2)
    folder = write_folder(tmp_path / "a", SIZES)
    data, read = opened(config(tmp_path, folder, data={"verify": "quick"})), []
    other = content_hash.KnownHashes(data.index.folder.parent / content_hash.FOLDER)
    work = {place.record_id: place for _, _, place in content_hash._media_bytes(data.index)}

    def counted(bytes_):
        read.append(content_of(bytes_))
        if len(read) == 2:  # while the first two are read, another process has read three more
            for place in list(work.values())[-3:]:
                other.add(place.stamp, content_of((folder / place.media.path).read_bytes()))
            other._file.flush()
        return content_of(bytes_)

    monkeypatch.setattr(content_hash, "content_of", counted)
    monkeypatch.setattr(content_hash, "hash", lambda words: 0, raising=False)
    assert listed(data, PICTURES).count == len(SIZES) and len(read) == len(SIZES) - 3
    assert addresses_of(listed(data, PICTURES)) == addresses_of(
        listed(opened(config(tmp_path / "full", folder)), PICTURES)
    )


def test_what_cannot_be_read_now_is_named_and_tried_again(tmp_path):
    folder = write_folder(tmp_path / "a", SIZES)
    data = opened(config(tmp_path, folder, data={"verify": "quick"}))
    gone, other = folder / "0002.png", folder / "0004.png"
    kept = gone.read_bytes()
    gone.unlink()
    os.utime(other, ns=(1, 1))
    wanted = listed(data, PICTURES)
    assert wanted.count == len(SIZES) - 2 and wanted.num_passed == 2
    assert {Path(each.path).name: each.reason.split(":")[0] for each in wanted.passed} == {
        "0002.png": "unreadable", "0004.png": "changed"
    }  # fmt: skip
    lost = [i for i in range(len(SIZES)) if data.index.record(i).media.path in ("0002.png", "0004.png")]
    for record_id in lost:
        with pytest.raises(Unusable, match="not cached"):
            AddressByRecord(wanted.folder).addresses([record_id], [False])
    assert listed(data, PICTURES, look=False).num_passed == 2
    gone.write_bytes(kept)
    found = next(record for record in map(data.index.record, lost) if record.media.path == "0002.png")
    os.utime(gone, ns=(1, 1))
    assert listed(data, PICTURES).count == wanted.count  # not the file that was indexed
    again = listed(opened(config(tmp_path, folder, data={"verify": "quick"})), PICTURES)
    assert again.count == len(SIZES) and found.key


def test_bad_pictures_are_rejected_and_the_others_made(tmp_path):
    folder = write_folder(tmp_path / "a", [(64, 64)] * 6)
    data = opened(config(tmp_path, folder))
    wanted = listed(data, PICTURES)
    names = {row: data.index.record(int(wanted.entries[row]["record"])).media.path for row in range(wanted.count)}
    (folder / "0000.png").write_bytes(b"")  # no longer what the address was made of
    (folder / "0001.png").unlink()
    pieces = pieces_of(data, wanted)
    assert {Path(each.path).name: each.reason.split(":")[0] for p in pieces for each in p.passed} == {
        "0000.png": "changed since", "0001.png": "unreadable"
    }  # fmt: skip
    assert not any(piece.rejected for piece in pieces)
    assert sorted(names[row] for piece in pieces for row in piece.rows) == [f"000{i}.png" for i in range(2, 6)]


def test_what_the_decoder_refuses_is_as_bad_next_time(tmp_path):
    folder = write_folder(tmp_path / "a", [(64, 64)] * 4)
    whole = (folder / "0001.png").read_bytes()
    (folder / "0001.png").write_bytes(whole[:200] + bytes(len(whole) - 200 - 12) + whole[-12:])  # its end is there
    data = opened(config(tmp_path, folder, data={"verify": "quick", "flip": True}))
    pieces = pieces_of(data, listed(data, PICTURES))
    rejected = {row: each for piece in pieces for row, each in piece.rejected.items()}
    assert len(rejected) == 2 and all("0001.png" in name for name, _ in rejected.values())
    assert len({reason for _, reason in rejected.values()}) == 1
    assert sum(len(piece.rows) for piece in pieces) == 6


@pytest.mark.parametrize("kind", PASSING)
def test_what_this_machine_lacks_is_no_fault_of_the_picture(data, monkeypatch, kind):
    def refuse(*args):
        raise Unusable(kind, "1 GiB more")

    wanted = listed(data, PICTURES)
    monkeypatch.setattr("difftrain.cache.decoding.decode_layers", refuse)
    pieces = pieces_of(data, wanted)
    assert not any(piece.rejected or piece.batch for piece in pieces)
    assert {each.reason.split(":")[0] for piece in pieces for each in piece.passed} == {kind}


def test_captions_are_wanted_once_with_the_empty_one(tmp_path):
    folder = write_folder(tmp_path / "a", SIZES)
    for number in (0, 1):
        (folder / f"000{number}.txt").write_text("the same")
    data = opened(config(tmp_path, folder))
    wanted, other = listed(data, TEXT, dataclasses.replace(TEXT, name="text_encoder_2", fingerprint="te 2"))
    captions = [meta["caption"] for piece in pieces_of(data, wanted) for meta in piece.metas]
    assert captions[0] == "" and len(captions) == len(set(captions)) == len(SIZES) and wanted.count == other.count
    assert wanted.buckets() == [(Bucket(0, 0), len(SIZES))] and not set(addresses_of(wanted)) & set(addresses_of(other))
    for piece in pieces_of(data, wanted):
        tokens = tokenize([meta["caption"] for meta in piece.metas])
        assert torch.equal(piece.batch.features["input_ids_1"], tokens["input_ids_1"])


@pytest.mark.flags("cache_shuffle_num")
def test_every_caption_that_training_or_validation_draws_is_wanted(tmp_path):
    folder = write_folder(tmp_path / "a", SIZES)
    captions = {"shuffle": True, "tag_dropout_rate": 0.3, "enable_wildcard": True, "dropout_rate": 0.2}
    for number in range(len(SIZES)):
        (folder / f"{number:04d}.txt").write_text(f"one {number}, {{two|three}}, four, five\nsix, seven, eight")
    cfg = config(tmp_path, folder, captions=captions, validation={"split": 0.4, "seed": 3}, cache={"shuffle_num": 4})
    data = opened(cfg)
    wanted = listed(data, TEXT)
    known = {meta["caption"] for piece in pieces_of(data, wanted) for meta in piece.metas}
    drawn, ids = set(), data.tables.ids()
    held = {int(i) for rows in data.tables.validation for i in ids[rows.first : rows.first + rows.records]}
    assert 0 < len(held) < len(SIZES)
    for record in map(data.index.record, range(data.index.count)):
        recipes = tuple(recipe.plain() if record.id in held else recipe for recipe in data.recipes)
        maker = SampleMaker(data.index, recipes, FEATURES, tokenize, 5)
        uses = {maker.caption(record, Draw(record.id, record.key, use), 0) for use in range(80)}
        assert len(uses - {""}) <= 4
        drawn |= uses
    assert drawn <= known and "" in drawn


def test_long_work_says_how_long_it_will_take(tmp_path, monkeypatch):
    data, said = opened(config(tmp_path, write_folder(tmp_path / "a", SIZES), data={"verify": "quick"})), []
    monkeypatch.setattr("difftrain.cache.manifest.captions._TOKENISED_AT_ONCE", 3)
    for module in ("captions", "content_hash"):
        monkeypatch.setattr(f"difftrain.cache.manifest.{module}._SAY_EVERY_S", 0.0)
    build_manifests(data, [PICTURES, TEXT], tokenize, log=said.append)
    assert any("captions of 6 of 8 records" in line and "min left" in line for line in said)
    assert any("8 of 8 files" in line and "MiB a second" in line for line in said)


@pytest.mark.parametrize("vary", [False, True])
def test_what_is_known_of_captions_is_taken_over_when_the_data_change(tmp_path, vary):
    folder, seen = write_folder(tmp_path / "a", SIZES), []

    def counted(captions):
        seen.extend(captions)
        return tokenize(captions)

    counted.identity = "counted"
    more = {"captions": {"shuffle": True}, "cache": {"shuffle_num": 3}} if vary else {}
    cfg = config(tmp_path, folder, validation={"split": 0.4, "seed": 3}, **more)
    both = TEXT, dataclasses.replace(TEXT, name="text_encoder_2", fingerprint="te 2")
    listed(opened(cfg), *both, tokens=counted)
    write_folder(folder, SIZES[:2], start=20)
    (folder / "0003.txt").write_text("another, caption, than, before")
    (folder / "0005.png").unlink()
    seen.clear()
    data = opened(cfg)
    found = listed(data, *both, tokens=counted)
    new = [caption for caption in seen if caption]
    assert all("20" in each or "21" in each or "another" in each for each in new)
    assert 3 <= len(new) <= (9 if vary else 3)
    seen.clear()
    other = config(tmp_path / "anew", folder, validation={"split": 0.4, "seed": 3}, **more)
    anew = listed(opened(other), *both, tokens=counted)
    assert len(seen) > len(new) + 1
    for one, two in zip(found, anew, strict=True):
        for part in ("addresses", "entries", "references"):
            assert getattr(one, part).tobytes() == getattr(two, part).tobytes()
        assert [p.metas for p in pieces_of(data, one)] == [p.metas for p in pieces_of(data, two)]
    seen.clear()
    listed(opened(config(tmp_path, folder, captions={"prefix": "p"})), *both, tokens=counted)
    assert len(seen) == 1 + 9  # drawn in another way, so another caption


def test_captions_that_never_end_are_not_listed(tmp_path):
    cfg = config(tmp_path, write_folder(tmp_path / "a", SIZES), captions={"shuffle": True})
    data = opened(cfg)
    with pytest.raises(ValueError, match="num_variants"):
        captions_of(data.index.record(0), data.recipes[0])


def test_a_tokenizer_that_changed_unnoticed_is_a_fault(data):
    wanted = listed(data, TEXT)

    def other(captions):
        return {name: each + 1 for name, each in tokenize(captions).items()}

    fault = DecodingDataset(data, wanted, other)[0]
    assert isinstance(fault, DataFault) and str(wanted.folder) in str(fault)


@pytest.mark.flags("alpha_mask")
def test_alpha_masks_are_made_as_training_makes_them(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for number, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 4), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("x")
    data = opened(config(tmp_path, folder, data={"alpha_mask": True, "flip": True}))
    made = mask_encoder(data.recipes)
    wanted = listed(data, ManifestRequest(MASKS, made, made.fingerprint(), "uint8", 4))
    maker = SampleMaker(data.index, tuple(r.plain() for r in data.recipes), FEATURES, tokenize, 0)
    for piece in pieces_of(data, wanted):
        masks = made.encode(piece.batch)["mask"]
        assert masks.dtype == torch.uint8
        for i, row in enumerate(piece.rows):
            record = data.index.record(int(wanted.entries[row]["record"]))
            mask = maker.sample(record, Draw(record.id, record.key, 0), 0).mask
            mask = mask[..., ::-1] if wanted.entries[row]["variant"] else mask
            assert np.array_equal(masks[i].numpy().astype(np.float32) / np.float32(255), mask)
    assert wanted.count == 2 * len(SIZES)
    assert mask_encoder([dataclasses.replace(recipe, alpha_mask=False) for recipe in data.recipes]) is None


@pytest.mark.flags("conditioning_data_dir")
def test_masks_of_a_folder_are_known_by_their_own_bytes(tmp_path):
    folder, masks = write_folder(tmp_path / "a", SIZES), tmp_path / "m"
    masks.mkdir()
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (30 * number, 0, 9)).save(masks / f"{number:04d}.png")
    more = {"conditioning_dir": str(masks)}
    cfg = config(tmp_path, folder, data=more, loss={"masked": True})
    data = opened(cfg)
    made = mask_encoder(data.recipes)
    asked = ManifestRequest(MASKS, made, made.fingerprint(), "uint8", 4)
    pictures, first = listed(data, PICTURES, asked)
    assert first.count == len(SIZES) and not any(piece.rejected or piece.passed for piece in pieces_of(data, first))
    values = {int(v) for p in pieces_of(data, first) for v in p.batch.features["mask"].unique()}
    assert values == {30 * number for number in range(len(SIZES))}
    Image.new("RGB", SIZES[2], (255, 0, 0)).save(masks / "0002.png")
    (piece,) = [p for p in pieces_of(data, first) if p.passed]
    assert "its mask" in piece.passed[0].reason
    assert listed(data, asked, look=False).folder == first.folder
    latents, second = listed(data, PICTURES, asked)
    assert latents.folder == pictures.folder
    assert len(set(addresses_of(first)) - set(addresses_of(second))) == 1 and second.count == first.count
    (masks / "0005.png").unlink()
    third = listed(data, asked)
    assert third.count == first.count - 1 and "no mask" in third.passed[0].reason


def test_a_cache_that_can_only_be_read_gets_its_list_elsewhere(data, monkeypatch):
    def refuse(self, *args, **more):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        wanted = listed(data, PICTURES)
        assert wanted.count == len(SIZES) and data.index.folder not in wanted.folder.parents
    assert addresses_of(listed(data, PICTURES)) == addresses_of(wanted)


def test_missing_entries_are_told_in_their_order(data):
    wanted = listed(data, PICTURES)
    there = {wanted.addresses[row].tobytes() for row in (0, 3, 5)}
    found = wanted.missing(lambda some: np.array([each.tobytes() in there for each in some]))
    assert np.flatnonzero(~found).tolist() == [0, 3, 5]


def test_the_first_of_each_address_counts_also_in_parts(monkeypatch):
    numbers = np.random.default_rng(0).integers(0, 300, 2000)
    addresses = as_array([content_of(bytes([n % 256, n // 256])) for n in numbers.tolist()])
    seen: set[int] = set()
    wanted = [not (n in seen or seen.add(n)) for n in numbers.tolist()]
    assert first_occurrences(addresses).tolist() == wanted
    monkeypatch.setattr("difftrain.cache.manifest.manifest._PART", 170)
    monkeypatch.setattr("difftrain.cache.manifest.manifest._CHUNK", 64)
    assert first_occurrences(addresses).tolist() == wanted
    assert first_occurrences(addresses[:0]).tolist() == []
