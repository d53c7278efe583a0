"""Exports of cached features: what is in the files, in which form, and what is left of an export that fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from refusals import is_about
from safetensors import safe_open

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.format import PackedEntry, pack, reject
from difftrain.cache.store.index import Metadata, merge
from difftrain.cache.store.references import REFERENCE_ROW
from difftrain.cache.store.segment import SegmentWriter
from difftrain.cache.store.storage import stored
from difftrain.cache.tools import export_files
from difftrain.cache.tools.export import ExportReport, export
from difftrain.contracts import ConfigFault, DataFault, TrainingFault

RECORDS = 6
NOBODY = bytes(16)


def key(number: int) -> bytes:
    return bytes([number + 1]) * 16


def address(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def latents(number: int, flip: int) -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2 * number + flip))


def text(number: int, variant: int) -> torch.Tensor:
    made = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + 2 * number + variant))
    made[3 + variant :] = 0
    return made


def mask(number: int) -> torch.Tensor:
    return torch.full((1, 3, 5), number, dtype=torch.uint8)


def pictures(number: int) -> list[PackedEntry]:
    name = {"name": f"{number}.jpg"}
    if number == 5:
        return [reject(address("latents", number, flip), "5.jpg", "corrupt: no picture") for flip in (0, 1)]
    return [
        PackedEntry(address("latents", number, flip), pack([stored("moments", latents(number, flip), "float32")], name))
        for flip in (0, 1)
    ]


def captions(number: int) -> list[PackedEntry]:
    made = []
    for variant in (0, 1) if number >= 0 else (0,):
        features = [
            stored("hidden", text(number, variant), "float8_e4m3fn", rows=3 + variant),
            stored("pooled", text(number, variant)[0], "bfloat16"),
        ]
        meta = {"caption": f"caption {variant} of {number}, “quoted”" if number >= 0 else ""}
        made.append(PackedEntry(address("text", number, variant), pack(features, meta)))
    return made


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    """Make a cache of pictures with their mirror images, two captions each, and masks of some."""
    folder = CacheFolder.open(tmp_path / "cache", create=True)
    made = {
        "latents": [item for number in range(RECORDS) for item in pictures(number)],
        "text_encoder_1": [item for number in range(-1, RECORDS) for item in captions(number)],
        "masks": [PackedEntry(address("masks", 1), pack([stored("mask", mask(1), "uint8")], {"name": "1.jpg"}))],
    }
    for encoder, items in made.items():
        header = {"encoder": encoder, "fingerprint": "f", "features": {}, "storage": "s"}
        writer = SegmentWriter(folder, header)
        for item in reversed(items):
            writer.append([item])
        writer.close()
    merge(folder)
    rows = {
        "latents": [(key(n), flip, address("latents", n, flip)) for n in range(RECORDS) for flip in (0, 1)],
        "text_encoder_1": [(NOBODY, 0, address("text", -1, 0))]
        + [(key(n), variant, address("text", n, variant)) for n in range(RECORDS) for variant in (0, 1)],
        "masks": [(key(1), 0, address("masks", 1))],
    }
    references.write(folder, "use-a", {}, {name: np.array(each, REFERENCE_ROW) for name, each in rows.items()})
    references.mark_complete(folder, "use-a")
    return folder


def run(cache: CacheFolder, output: Path, layout: str, **more) -> ExportReport:
    return export(cache.path, output, layout, log=more.pop("log", lambda line: None), **more)


def members(output: Path) -> dict[str, bytes]:
    found = {}
    for shard in sorted(output.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for info in tar:
                assert (info.mtime, info.uid, info.uname) == (0, 0, "")
                found[info.name] = tar.extractfile(info).read()
    return found


def eight_bits(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as storage in 8 bits and bf16 give it back."""
    scales = value.abs().amax(dim=1, keepdim=True) / 448
    return ((value / scales.clamp_min(1e-30)).to(torch.float8_e4m3fn).float() * scales).bfloat16()


def test_tars_hold_all_encoders_of_a_record_together(cache, tmp_path) -> None:
    found = run(cache, tmp_path / "out", "webdataset")
    assert (found.samples, found.rejected, found.damaged, found.use) == (RECORDS, 1, [], "use-a"), (
        "5 records and nobody"
    )
    there = members(tmp_path / "out")
    name = key(1).hex()
    assert sorted(each for each in there if each.startswith(name)) == [
        f"{name}.{part}"
        for part in (
            "json",
            "latents-1.safetensors",
            "latents.safetensors",
            "masks.safetensors",
            "text_encoder_1-1.safetensors",
            "text_encoder_1.safetensors",
        )
    ]
    for flip in (0, 1):
        tensors = safetensors.torch.load(there[f"{name}.latents{'-1' if flip else ''}.safetensors"])
        assert torch.equal(tensors["moments"], latents(1, flip))
        tensors = safetensors.torch.load(there[f"{name}.text_encoder_1{'-1' if flip else ''}.safetensors"])
        assert tensors["hidden"].dtype == tensors["pooled"].dtype == torch.bfloat16
        assert torch.equal(tensors["hidden"], eight_bits(text(1, flip)))
        assert torch.equal(tensors["pooled"], text(1, flip)[0].bfloat16())
    assert torch.equal(safetensors.torch.load(there[f"{name}.masks.safetensors"])["mask"], mask(1))
    facts = json.loads(there[f"{name}.json"])
    assert facts["name"] == "1.jpg" and facts["caption"] == "caption 0 of 1, “quoted”"
    told = {part["part"]: part for part in facts["parts"]}
    assert told["text_encoder_1-1"]["caption"] == "caption 1 of 1, “quoted”"
    assert told["text_encoder_1-1"]["features"]["hidden"] == {"shape": [8, 6], "stored_as": "float8_e4m3fn", "rows": 4}
    assert told["latents"]["address"] == address("latents", 1, 0).hex()
    nobody = [each for each in there if each.startswith(NOBODY.hex())]
    assert sorted(nobody) == [f"{NOBODY.hex()}.json", f"{NOBODY.hex()}.text_encoder_1.safetensors"]
    assert not any(each.startswith(key(5).hex()) for each in there), "of this picture there are no latents"


def test_safetensors_hold_the_same(cache, tmp_path) -> None:
    found = run(cache, tmp_path / "out", "safetensors", shard_bytes=1500)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == found.shards > 1 and found.samples == RECORDS
    tensors, lines = {}, []
    for shard in shards:
        lines += [json.loads(line) for line in shard.with_suffix(".jsonl").read_text().splitlines()]
        tensors |= safetensors.torch.load_file(shard)
        with safe_open(shard, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert [line["key"] for line in lines] == [NOBODY.hex(), *(key(n).hex() for n in range(5))]
    name = key(1).hex()
    assert {each for each in tensors if each.startswith(name)} == {
        f"{name}/{each}" for each in ("moments", "moments-1", "mask", "hidden", "hidden-1", "pooled", "pooled-1")
    }
    assert torch.equal(tensors[f"{name}/moments-1"], latents(1, 1)) and torch.equal(tensors[f"{name}/mask"], mask(1))
    assert torch.equal(tensors[f"{name}/hidden"], eight_bits(text(1, 0)))
    assert sum(value.nbytes for value in tensors.values()) == found.bytes
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == sorted(
        [".json", *[".jsonl", ".safetensors"] * len(shards)]
    )


@pytest.mark.parametrize("layout", ["webdataset", "safetensors"])
def test_files_are_bounded_and_equal_each_time(cache, tmp_path, layout) -> None:
    for name in ("a", "b"):
        found = run(cache, tmp_path / name, layout, shard_bytes=8000 if layout == "webdataset" else 1500)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert found.shards > 1
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).stat().st_size < 8000 + 12_000, "a tar ends with up to 10 KiB of zeros"


def test_stored_eight_bit_floats_can_be_had_with_their_scales(cache, tmp_path) -> None:
    run(cache, tmp_path / "out", "safetensors", values="storage", encoders=["text_encoder_1"])
    tensors = safetensors.torch.load_file(tmp_path / "out" / "shard-000000.safetensors")
    hidden, scales = tensors[f"{key(2).hex()}/hidden-1"], tensors[f"{key(2).hex()}/hidden.scales-1"]
    assert hidden.dtype == torch.float8_e4m3fn and hidden.shape == (8, 6) and scales.shape == (8,)
    assert torch.equal((hidden.float() * scales[:, None]).bfloat16(), eight_bits(text(2, 1)))


def test_some_encoders_alone(cache, tmp_path) -> None:
    found = run(cache, tmp_path / "out", "webdataset", encoders=["latents"])
    assert found.samples == 5 and not [each for each in members(tmp_path / "out") if "text" in each]
    with pytest.raises(ConfigFault, match=r"--encoders: 'latent' has .*in this cache .*latents"):
        run(cache, tmp_path / "more", "webdataset", encoders=["latent"])


def test_records_without_entries_of_an_encoder_are_counted(cache, tmp_path) -> None:
    rows = references.reference_of(cache, "use-a").rows("latents")
    text_rows = references.reference_of(cache, "use-a").rows("text_encoder_1")
    references.write(cache, "use-b", {}, {"latents": rows[2:], "text_encoder_1": text_rows})
    references.mark_complete(cache, "use-b")
    found = run(cache, tmp_path / "out", "webdataset", use="use-b")
    assert (found.samples, found.incomplete, found.rejected) == (5, 1, 1)


def test_of_several_configurations_the_last_used_is_taken(cache, tmp_path) -> None:
    rows = references.reference_of(cache, "use-a").rows("latents")
    for name in ("use-b", "use-c"):
        references.write(cache, name, {}, {"latents": rows[:2]})
    references.mark_complete(cache, "use-b")
    os.utime(cache.references_dir / "use-b.json", (9e9, 9e9))
    said: list[str] = []
    assert run(cache, tmp_path / "out", "webdataset", log=said.append).use == "use-b"
    assert any("of 2 configurations" in line and "--use=use-b" in line for line in said)
    with pytest.raises(ConfigFault) as caught:
        run(cache, tmp_path / "c", "webdataset", use="use-c")
    assert is_about(caught.value, "--use", "'use-c'", "incomplete")
    with pytest.raises(ConfigFault, match=r"'use-x' is .*configuration"):
        run(cache, tmp_path / "x", "webdataset", use="use-x")


def test_names_that_are_in_two_data_sets_make_two_samples(cache, tmp_path) -> None:
    twice = [(key(0), 0, address("latents", 0, 0)), (key(0), 0, address("latents", 1, 0))]
    references.write(cache, "use-b", {}, {"latents": np.array(twice, REFERENCE_ROW)})
    references.mark_complete(cache, "use-b")
    assert run(cache, tmp_path / "out", "webdataset", use="use-b").samples == 2
    there = members(tmp_path / "out")
    assert json.loads(there[f"{key(0).hex()}-1.json"])["name"] == "1.jpg"


def test_without_a_configuration_every_entry_is_a_sample(cache, tmp_path) -> None:
    references.remove(cache, "use-a")
    said: list[str] = []
    found = run(cache, tmp_path / "out", "webdataset", log=said.append)
    assert found.samples == 10 + 13 + 1 and found.rejected == 2 and said[0].endswith(" address")
    there = members(tmp_path / "out")
    tensors = safetensors.torch.load(there[f"{address('latents', 3, 1).hex()}.latents.safetensors"])
    assert torch.equal(tensors["moments"], latents(3, 1))


def test_damaged_entries_are_named_and_their_samples_left_out(cache, tmp_path) -> None:
    row = Metadata(cache.database).lookup(address("latents", 2, 1))
    with cache.file(row.segment, BIN).open("r+b") as file:
        file.seek(row.offset + row.length - 20)
        file.write(b"damaged")
    found = run(cache, tmp_path / "out", "webdataset")
    assert found.samples == RECORDS - 1 and found.num_damaged == 1
    assert all(
        word in found.damaged[0] for word in ("latents", key(2).hex(), row.segment, f"{row.offset:,}", "checksum")
    )
    assert not any(each.startswith(key(2).hex()) for each in members(tmp_path / "out"))
    (cache.file(row.segment, BIN)).unlink()
    found = run(cache, tmp_path / "again", "webdataset")
    assert found.num_damaged == 10 and found.samples == 1
    assert json.loads((tmp_path / "again" / "export.json").read_text())["num_damaged"] == 10


def test_entries_that_are_not_there_are_named(cache, tmp_path) -> None:
    rows = [(key(0), 0, address("nowhere"))]
    references.write(cache, "use-b", {}, {"latents": np.array(rows, REFERENCE_ROW)})
    references.mark_complete(cache, "use-b")
    found = run(cache, tmp_path / "out", "webdataset", use="use-b")
    assert found.num_damaged == 1 and found.damaged[0].endswith(" cache")


@pytest.mark.parametrize("layout", ["webdataset", "safetensors"])
def test_nothing_is_left_where_the_disk_is_full(cache, tmp_path, monkeypatch, layout) -> None:
    written = export_files.LAYOUTS[layout].close

    def full(self) -> None:
        written(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_files.LAYOUTS[layout], "close", full)
    with pytest.raises(TrainingFault, match=rf"^{tmp_path / 'place' / 'out'}: .*\({os.strerror(errno.ENOSPC)}\)"):
        run(cache, tmp_path / "place" / "out", layout)
    assert list((tmp_path / "place").iterdir()) == []


def test_what_a_killed_export_left_goes_and_that_of_one_at_work_stays(cache, tmp_path) -> None:
    for name, owner in (("dead", "x"), ("busy", "")):
        (tmp_path / f".out.partial-{name}").mkdir()
        (tmp_path / f".out.partial-{name}" / "owner").write_text(owner)
    from difftrain.io import process

    here = process.this_process()
    (tmp_path / ".out.partial-dead" / "owner").write_text(here.rpartition(":")[0] + ":1")
    (tmp_path / ".out.partial-busy" / "owner").write_text(here)
    run(cache, tmp_path / "out", "webdataset")
    assert [path.name for path in tmp_path.glob(".out.*")] == [".out.partial-busy"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layout": "zip"}, r"--format: 'zip' .*\(.*webdataset, safetensors\)"),
        ({"shard_bytes": 0}, "--shard_gib: .* above 0, got 0 "),
        ({"output": "s3://bucket/out"}, "--output: 's3://bucket/out' "),
        ({"output": "cache"}, "--output: 'cache' .*empty"),
    ],
)
def test_wrong_arguments_are_named(cache, tmp_path, monkeypatch, more, said) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigFault) as fault:
        export(cache.path, more.pop("output", tmp_path / "out"), more.pop("layout", "webdataset"), **more)
    assert re.search(said, str(fault.value))


def test_a_cache_of_nothing_is_named(tmp_path) -> None:
    with pytest.raises(DataFault, match=rf"^{tmp_path / 'none'}: .*cache\.json"):
        export(tmp_path / "none", tmp_path / "out", "webdataset")
    empty = CacheFolder.open(tmp_path / "empty", create=True)
    merge(empty)
    with pytest.raises(DataFault) as caught:
        run(empty, tmp_path / "out", "webdataset")
    assert is_about(caught.value, str(empty.path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_a_cache_on_an_object_store_is_exported_alike(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    run(cache, tmp_path / "here", "webdataset")
    export(f"file://{cache.path}", tmp_path / "there", "webdataset", log=lambda line: None)
    assert members(tmp_path / "here") == members(tmp_path / "there")
    references.write(cache, "use-b", {}, {"latents": references.reference_of(cache, "use-a").rows("latents")})
    references.mark_complete(cache, "use-b")
    with pytest.raises(ConfigFault, match=r"--use: .* 2 configurations .*, use-\w+, use-"):
        export(f"file://{cache.path}", tmp_path / "more", "webdataset", log=lambda line: None)
    export(f"file://{cache.path}", tmp_path / "more", "webdataset", use="use-a", log=lambda line: None)
    assert members(tmp_path / "here") == members(tmp_path / "more")


def test_tensors_of_any_width_may_follow_one_another(tmp_path) -> None:
    """Files of safetensors have no gaps: a wide number behind an odd count of bytes would be misplaced."""
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(2), "c": torch.randn(3).bfloat16()}
    shards = export_files.SafetensorsShards(tmp_path, 1 << 20)
    for name in ("x", "y"):
        shards.add(export_files.ExportSample(name, {"key": name}, [export_files.ExportPart("latents", "", tensors)]))
    shards.close()
    found = safetensors.torch.load_file(tmp_path / "shard-000000.safetensors")
    assert all(torch.equal(found[f"{name}/{each}"], tensors[each]) for name in ("x", "y") for each in tensors)
