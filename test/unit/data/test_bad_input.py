"""Bad input, from the files to what the user reads: each kind is named, and loses nothing but itself."""

import io
import os
import re
import struct
import tarfile
import zlib
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from rejects import kind

from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import DataFault
from difftrain.data.captions import caption_of
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.diffusion.draws import Stream
from difftrain.testing.pictures import picture, write_folder, write_tar


def build(tmp_path, *dirs, captions=None, decode_limit_s=60.0, **data):
    said = []
    section = DataSection(dirs=tuple(map(str, dirs)), **data)
    summary = build_index(
        section, CaptionSection(**(captions or {})), tmp_path / "index", log=said.append, decode_limit_s=decode_limit_s
    )
    return Index(Path(summary.folder)), "\n".join(said)


def reasons(index, root):
    return {os.path.relpath(reject.path, root): reject.reason for reject in index.rejects()}


def encoded(image, form="PNG"):
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def bomb():
    data = bytearray(encoded(Image.new("1", (16, 16))))
    data[16:24] = struct.pack(">II", 20_000, 20_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


GOOD = {"good": picture(1, (64, 48)), "jpeg": encoded(Image.new("RGB", (40, 40)), "JPEG")}
BAD = {
    "truncated.png": (GOOD["good"][:3000], "truncated"),
    "truncated.jpg": (GOOD["jpeg"][:-30], "truncated"),
    "zero.png": (b"", "empty"),
    "text.jpg": (b"I am a text file", "not image"),
    "thin.png": (encoded(Image.new("RGB", (1, 10_000))), "too small"),
    "tiny.png": (encoded(Image.new("RGB", (15, 400))), "too small"),
    "bomb.png": (bomb(), "too pixels"),
    "float.tif": (encoded(Image.new("F", (32, 32)), "TIFF"), "unsupported pixels"),
    "broken.bmp": (b"BM\xff\xff\xff\xff\0\0\0\0" + bytes(40), "broken"),
}


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_bad_pictures_are_named_and_the_good_ones_stay(tmp_path, verify):
    root = tmp_path / "a"
    root.mkdir()
    for name, data in {"good.png": GOOD["good"], "jpeg.jpg": GOOD["jpeg"]}.items():
        (root / name).write_bytes(data)
    for name, (data, _) in BAD.items():
        (root / name).write_bytes(data)
    for path in list(root.iterdir()):
        path.with_suffix(".txt").write_text(f"caption of {path.name}")
    index, said = build(tmp_path, root, verify=verify, max_rejected_share=1.0)
    found = reasons(index, root)
    assert {name: kind(reason) for name, reason in found.items()} == {name: wanted for name, (_, wanted) in BAD.items()}
    assert index.count == 2 and index.summary.rejected == len(BAD)
    assert "1 x 10000 px" in found["thin.png"] and "at least 16" in found["thin.png"]
    assert "index: rejected, too small: 2" in said


def test_bad_captions(tmp_path):
    root = write_folder(tmp_path / "a", [(20, 20)] * 6)
    (root / "0000.txt").write_bytes("naïve".encode("latin-1"))
    (root / "0001.txt").write_text("")
    (root / "0002.txt").unlink()
    (root / "0003.txt").write_text("word " * 2000)
    (root / "0004.txt").write_text("tag, " * 2000)
    index, said = build(tmp_path, root)
    found = reasons(index, root)
    assert {name: kind(reason) for name, reason in found.items()} == {
        "0000.png": "caption UTF-8",
        "0001.png": "empty caption",
        "0002.png": "no caption",
    }
    assert (
        all(what in found["0000.png"] for what in ("0xef", "position 2", "0000.txt"))
        and "0001.txt" in found["0001.png"]
    )
    assert ".caption" in found["0002.png"] and ".txt" in found["0002.png"]
    assert index.count == 3 and re.search("index: 2 .* 2,000 ", said)
    long = next(record for record in index.records(range(3)) if record.name.endswith("0003.png"))
    assert len(long.captions[0]) == 9999
    assert caption_of(long, Stream(1, long.key, 0, "caption"), CaptionSection(), 0) == long.captions[0]


def test_tars(tmp_path):
    root = tmp_path / "a"
    whole = write_tar(root / "0.tar", [(20, 20)] * 4)
    whole.write_bytes(whole.read_bytes()[: len(whole.read_bytes()) // 2])
    with tarfile.open(root / "1.tar", "w") as made:
        for name, data in {
            "../up.png": picture(1, (20, 20)),
            "nocaption.png": picture(2, (20, 20)),
            "7.png": picture(3, (20, 20)),
            "7.json": b'{"caption": "seven", "width": 20}',
            "8.json": b'{"caption": "no image"}',
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    (root / "2.tar").write_bytes(b"no tar at all" * 100)
    (root / "0_stats.json").write_text("{}")
    index, said = build(tmp_path, root, max_rejected_share=0.9)
    found = reasons(index, root)
    assert kind(found["1.tar!../up.png"]) == "outside folder"
    assert found["1.tar!nocaption.png"].startswith("no caption")
    assert found["1.tar!8.json"].startswith("no image")
    assert kind(found["2.tar"]) == "damaged shard" and "byte 0" in found["2.tar"]
    cut = {name: reason for name, reason in found.items() if name.startswith("0.tar")}
    assert cut and all(reason.startswith(("truncated", "no caption")) for reason in cut.values())
    names = {record.name for record in index.records(range(index.count))}
    assert "a/1.tar!7.png" in names and "a/0.tar!00000.png" in names
    assert not (tmp_path / "up.png").exists() and "1 .json" in said


def test_a_tar_without_any_caption_stops_with_the_remedy(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as made:
        info = tarfile.TarInfo("a.png")
        info.size = len(GOOD["good"])
        made.addfile(info, io.BytesIO(GOOD["good"]))
    with pytest.raises(DataFault, match="--allow_empty_caption"):
        build(tmp_path, tmp_path / "0.tar")
    index, _ = build(tmp_path, tmp_path / "0.tar", captions={"allow_empty": True})
    assert index.count == 1


def test_an_empty_tar(tmp_path):
    (tmp_path / "a").mkdir()
    tarfile.open(tmp_path / "a" / "0.tar", "w").close()
    with pytest.raises(DataFault, match=rf"^{re.escape(str(tmp_path / 'a'))}: "):
        build(tmp_path, tmp_path / "a")


def test_a_parquet_without_the_column(tmp_path):
    table = pyarrow.table({"url": ["x"], "caption": ["y"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataFault) as caught:
        build(tmp_path, tmp_path / "a.parquet")
    assert "no column" in str(caught.value) and "Columns found: url (string), caption (string)" in str(caught.value)
    assert caught.value.exit_code == 2 and not list((tmp_path / "index").glob("*"))


def test_too_much_rejected_stops_with_the_sum_and_examples(tmp_path):
    root = write_folder(tmp_path / "a", [(20, 20)] * 10)
    for i in range(5):
        (root / f"{i:04d}.png").write_bytes(b"")
    (root / "0005.txt").unlink()
    index, _ = build(tmp_path, root, max_rejected_share=0.6)
    assert index.count == 4
    with pytest.raises(DataFault) as caught:
        build(tmp_path, root)
    said = str(caught.value)
    assert re.match(r"6 of 10 .*\(60%; data\.max_rejected_share .*0\.5\)", said)
    assert dict(re.findall(r"(\d+) x ([a-z ]+)", said)) == {"5": "empty", "1": "no caption"}
    assert f"{root / '0000.png'}: empty: 0 bytes" in said and said.count("empty: 0 bytes") == 3
    assert "--max_rejected_share" in said and "--allow_empty_caption" in said and caught.value.exit_code == 2


@pytest.mark.flags("max_rejected_share")
def test_half_is_not_too_much_and_all_is_always_too_much(tmp_path):
    root = write_folder(tmp_path / "a", [(20, 20)] * 2)
    (root / "0000.png").write_bytes(b"")
    index, _ = build(tmp_path, root)
    assert index.count == 1
    (root / "0001.png").write_bytes(b"")
    with pytest.raises(DataFault, match=r"^2 of 2 .*100%.*data\.max_rejected_share"):
        build(tmp_path, root, max_rejected_share=1.0)


def test_missing_and_empty_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataFault) as caught:
        build(tmp_path, tmp_path / "gone", tmp_path / "empty")
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        str(tmp_path / name) for name in ("gone", "empty")
    ]
    assert caught.value.exit_code == 2


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def in_single_bytes(png):
    """Spread the pixels of a PNG over chunks of one byte each: seconds to decode by Pillow, and not damaged.

    One colour is marked as see-through, which the faster decoder leaves to Pillow.
    """
    png = png[: (at := png.index(b"IDAT") - 4)] + chunk(b"tRNS", bytes(6)) + png[at:]
    start, end = png.index(b"IDAT") - 4, png.index(b"IEND") - 4
    data, at = b"", start
    while at < end:
        length = int.from_bytes(png[at : at + 4], "big")
        data, at = data + png[at + 8 : at + 8 + length], at + 12 + length
    ends = [zlib.crc32(bytes([byte]), zlib.crc32(b"IDAT")) for byte in range(256)]
    chunks = [struct.pack(">I4sBI", 1, b"IDAT", byte, ends[byte]) for byte in range(256)]
    return png[:start] + b"".join(chunks[byte] for byte in data) + png[end:]


@pytest.mark.workers
def test_a_picture_that_takes_too_long_is_given_up(tmp_path):
    root = write_folder(tmp_path / "a", [(20, 20)] * 3)
    (root / "slow.png").write_bytes(in_single_bytes(picture(7, (640, 640))))
    (root / "slow.txt").write_text("slow")
    index, _ = build(tmp_path, root, decode_limit_s=0.5, verify="full")
    assert [*reasons(index, root)] == ["slow.png"] and index.count == 3
    assert re.fullmatch(r"too slow: .* 0\.5 s", reasons(index, root)["slow.png"])
    index, _ = build(tmp_path, root, verify="full")  # a slow disk passes: it is tried again
    assert index.count == 4
