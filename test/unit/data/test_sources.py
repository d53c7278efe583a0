"""Sources: what is found in a folder, which caption belongs to which picture, and that bytes are read in place."""

import io
import json
import random
import re
import tarfile

import pyarrow
import pytest
from pyarrow import parquet
from refusals import is_about, names
from rejects import kind

from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import ConfigFault, DataFault, MediaRef
from difftrain.data.sources import open_source
from difftrain.data.sources.base import BadItem, FileRef, SourceItem
from difftrain.data.sources.configured import configured_sources
from difftrain.data.sources.tar_headers import read_members
from difftrain.testing.pictures import picture

PNG = picture(0, (20, 20))


def configured(*dirs, extension=None, enable_wildcard=False, **data):
    captions = CaptionSection(extension=extension, enable_wildcard=enable_wildcard)
    return configured_sources(DataSection(dirs=tuple(map(str, dirs)), **data), captions)


def open_only(*dirs, **settings):
    (info,) = configured(*dirs, **settings).infos
    return open_source(info)


def files(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG if not name.endswith((".txt", ".caption", ".json", ".npz", ".zip")) else b"words")
    return root


def tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as made:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


def items_of(source, path, caption=None):
    found = list(source.items(FileRef(path, caption)))
    return {item.member: item for item in found if isinstance(item, SourceItem)}, {
        item.member: item.reason for item in found if isinstance(item, BadItem)
    }


# ---- which kind a folder is


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jpg", "b/c.png"], "folder"),
        (["deep/er/a.JPG"], "folder"),
        (["a.jpg", "000.tar"], "tar"),
        (["0/000.tar"], "tar"),
        (["000.tar", "000.parquet", "000_stats.json"], "tar"),
        (["a.jpg", "metadata.parquet"], "folder"),
        (["data/train-0.parquet"], "parquet"),
        (["train.parquet", "pictures/a.jpg"], "parquet"),
    ],
)
def test_the_first_level_with_data_decides(tmp_path, names, kind):
    (info,) = configured(files(tmp_path, names)).infos
    assert info.kind == kind and info.name == "0" and info.root == str(tmp_path)


def test_kohyas_folders(tmp_path):
    files(
        tmp_path,
        [
            "10_sks dog/a.jpg",
            "3_cat_sitting/b.jpg",
            "7_/c.jpg",
            "8/g.jpg",
            "0_none/d.jpg",
            "000/f.jpg",
            "notes/e.jpg",
            "2_empty/x.txt",
        ],
    )
    made = configured(tmp_path, repeats=(2,))
    found = {info.prefix: (info.repeats, info.words) for info in made.infos}
    assert found == {
        "10_sks dog/": (10, "sks dog"),
        "3_cat_sitting/": (3, "cat_sitting"),
        "7_/": (7, ""),
        "8/": (8, ""),
    }
    assert all(info.flat for info in made.infos)
    assert any("--dataset_repeats" in note for note in made.notes) and any("7_, 8" in note for note in made.notes)
    assert [info.ordinal for info in made.infos] == [0, 1, 2, 3] and {info.name for info in made.infos} == {"0"}
    assert sorted(made.outside()) == [f"{tmp_path}/{name}" for name in ("000/f.jpg", "0_none/d.jpg", "notes/e.jpg")]
    assert "10_sks dog x 10" in made.notes[0]


def test_numbered_folders_are_no_repeats(tmp_path):
    (info,) = configured(files(tmp_path, ["000/a.jpg", "001/b.jpg"])).infos
    assert (info.kind, info.repeats, info.prefix) == ("folder", 1, "")


def test_pictures_beside_class_folders_are_nobodys(tmp_path):
    made = configured(files(tmp_path, ["a.jpg", "4_summer/b.jpg", "4_summer/deep/c.jpg"]))
    (info,) = made.infos
    assert (info.kind, info.repeats, info.prefix) == ("folder", 4, "4_summer/")
    left = [f"{tmp_path}/{name}" for name in ("4_summer/deep/c.jpg", "a.jpg")]
    assert sorted(made.outside()) == left and any("2 images" in note and "c.jpg" in note for note in made.notes)


def test_several_folders_with_repeats(tmp_path):
    first, second = files(tmp_path / "a", ["x.png"]), files(tmp_path / "b", ["y.png"])
    made = configured(first, second, repeats=(3, 5))
    assert [(info.ordinal, info.name, info.repeats) for info in made.infos] == [(0, "0", 3), (1, "1", 5)]
    assert [info.repeats for info in configured(first, second, repeats=(4,)).infos] == [4, 4]
    with pytest.raises(ConfigFault, match="3 numbers for 2 folders"):
        configured(first, second, repeats=(1, 2, 3))


def test_a_single_tar_or_parquet_file(tmp_path):
    tar(tmp_path / "a.tar", {"1.png": PNG})
    tar(tmp_path / "b.tar", {"1.png": PNG})
    source = open_only(tmp_path / "b.tar")
    assert [file.path for file in source.listing() if file.role == "media"] == ["b.tar"]


def test_missing_and_empty_folders_are_named_together(tmp_path):
    files(tmp_path / "other", ["a.zip", "b.zip", "c/d.txt"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.zip").write_bytes(b"x")
    with pytest.raises(DataFault) as caught:
        configured(*(tmp_path / name for name in ("gone", "empty", "other", "file.zip")))
    gone, empty, other, file = str(caught.value).splitlines()
    assert gone.startswith(f"{tmp_path / 'gone'}: ") and "--train_data_dir" in gone
    assert empty.startswith(f"{tmp_path / 'empty'}: ") and "found: nothing" in empty and ".tar or .parquet" in empty
    assert "found: 2 .zip, 1 .txt" in other
    assert file.startswith(f"{tmp_path / 'file.zip'}: ") and ".tar or .parquet" in file and "found" not in file
    with pytest.raises(ConfigFault) as nothing:
        configured()
    assert [fault.where for fault in nothing.value.faults] == ["data.dirs"]


# ---- folders


def test_listing_goes_down_and_leaves_hidden_files_out(tmp_path):
    files(
        tmp_path, ["a.jpg", "b/c.PNG", "b/c.txt", "b/d/e.webp", ".hidden/f.jpg", "._g.jpg", "__MACOSX/h.jpg", "i.npz"]
    )
    (tmp_path / "b" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "linked").symlink_to(files(tmp_path.parent / "elsewhere", ["k.gif"]), target_is_directory=True)
    roles = {}
    for file in open_only(tmp_path).listing():
        roles.setdefault(file.role, []).append(file.path)
    assert sorted(roles["media"]) == ["a.jpg", "b/c.PNG", "b/d/e.webp", "linked/k.gif"]
    assert roles["caption"] == ["b/c.txt"] and roles["other"] == ["i.npz"]


@pytest.mark.parametrize(("text", "caption"), [
    (b"a cat", ("a cat",)),
    (b"\xef\xbb\xbfa cat\r\n", ("a cat",)),
    ("ein Fuchs – 狐\nsecond line".encode(), ("ein Fuchs – 狐",)),
    (b"\n  \n a dog \n", ("a dog",)),
    (b"", ()),
    (b" \n\t", ()),
])  # fmt: skip
def test_a_caption_is_the_first_line_that_is_not_blank(tmp_path, text, caption):
    files(tmp_path, ["a.jpg", "a.txt"])
    (tmp_path / "a.txt").write_bytes(text)
    items, _ = items_of(open_only(tmp_path), "a.jpg", "a.txt")
    assert items[None].captions == caption


def test_reasons_of_bad_captions(tmp_path):
    files(tmp_path, ["a.jpg", "a.txt"])
    source = open_only(tmp_path, extension="txt")
    (tmp_path / "a.txt").write_bytes("grün".encode("latin-1"))
    assert items_of(source, "a.jpg", "a.txt")[1] == {None: "caption not UTF-8: byte 0xfc at position 2 of a.txt"}
    (tmp_path / "a.txt").write_bytes(b"a " * (1 << 20))
    assert re.match(rf"caption .* long: a\.txt .*{1 << 20} ", items_of(source, "a.jpg", "a.txt")[1][None])
    (tmp_path / "a.txt").write_bytes(b"")
    assert is_about(items_of(source, "a.jpg", "a.txt")[0][None].lacking, "empty caption", "a.txt")
    assert items_of(source, "a.jpg")[0][None].lacking.startswith("no caption: no .txt file")


# ---- tars


def test_captions_of_a_tar(tmp_path):
    tar(
        tmp_path / "0.tar",
        {
            "000.png": PNG,
            "000.txt": b"from the text\n of two lines",
            "000.json": b'{"caption": "from the json"}',
            "001.json": json.dumps({"caption": "日本語", "width": 3}).encode(),
            "001.jpg": PNG,
            "002.webp": PNG,
            "003.png": PNG,
            "003.json": b'{"caption": null}',
            "004.png": PNG,
            "004.json": b'{"caption": ["one", "two"]}',
            "sub/005.png": PNG,
            "sub/005.txt": b"below",
            "notes.txt": b"ignored",
            "6.txt": b"",
            "6.png": PNG,
        },
    )
    source = open_only(tmp_path)
    items, bad = items_of(source, "0.tar")
    assert {name: item.captions for name, item in items.items()} == {
        "000.png": ("from the text of two lines",),
        "001.jpg": ("日本語",),
        "002.webp": (),
        "003.png": (),
        "004.png": ("one", "two"),
        "sub/005.png": ("below",),
        "6.png": (),
    }
    assert not bad
    assert re.match(r"no caption: .*\.txt or \.json ", items["002.webp"].lacking)
    assert is_about(items["003.png"].lacking, "empty caption", "003.json")
    assert is_about(items["6.png"].lacking, "empty caption", "6.txt")
    for item in items.values():
        assert item.size == item.length == len(PNG) and item.offset % 512 == 0
        assert source.read(MediaRef(0, "0.tar", item.offset, item.length)) == PNG
        with item.open() as opened:
            assert opened.read() == PNG


def test_members_that_are_listed_and_not_used(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as made:

        def add(name, data=b"", **more):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            made.addfile(info, io.BytesIO(data))

        add("001.json", b'{"caption": "no image"}')
        add("001.txt", b"no image")
        add("002.txt", b"no image")
        add("readme.txt", b"not ours")
        add("../../escape.png", PNG)
        add("/etc/absolute.png", PNG)
        add("..\\windows.png", PNG)
        add("003.png", b"")
        add("link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("twice.png", PNG)
        add("twice.png", PNG + b"later")
        add("twice.txt", b"words")
        add("bad.png", PNG)
        add("bad.txt", "naïve".encode("latin-1"))
        add("torn.png", PNG)
        add("torn.json", b'{"caption": ')
        add("deep.png", PNG)
        add("deep.json", b"[" * 100_000)
        add("odd.png", PNG)
        add("odd.json", b'{"caption": 7}')
        add("._001.jpg", b"mac")
    items, bad = items_of(open_only(tmp_path), "0.tar")
    assert list(items) == ["twice.png"] and items["twice.png"].size == len(PNG) + 5
    assert bad.pop("torn.png").startswith("broken sidecar: torn.json is not JSON")
    assert bad.pop("deep.png").startswith("broken sidecar: deep.json is not JSON")
    assert {name: kind(reason) for name, reason in bad.items()} == {
        "001.json": "no image",
        "002.txt": "no image",
        "../../escape.png": "outside folder",
        "/etc/absolute.png": "outside folder",
        "..\\windows.png": "outside folder",
        "003.png": "empty",
        "link.png": "not file",
        "twice.png": "same twice",
        "bad.png": "caption UTF-8",
        "odd.png": "caption text",
    }
    values = {
        "003.png": ("0 bytes",),
        "link.png": ("symbolic link",),
        "bad.png": ("0xef", 2, "bad.txt"),
        "odd.png": ("odd.json", "int"),
    }
    assert all(names(bad[name], *facts) for name, facts in values.items())


def test_a_cut_tar_keeps_what_is_whole(tmp_path):
    whole = tar(
        tmp_path / "0.tar", {f"{i}.{end}": PNG if end == "png" else b"w" for i in range(4) for end in ("png", "txt")}
    )
    second = next(member for member in read_members(whole) if member.name == "1.png")
    whole.write_bytes(whole.read_bytes()[: second.offset + 100])
    items, bad = items_of(open_only(tmp_path), "0.tar")
    assert list(items) == ["0.png"] and items["0.png"].captions == ("w",)
    assert bad["1.png"].startswith("truncated: ") and bad[None].startswith("truncated shard: ")


def test_a_shard_that_shrank_is_noticed_when_it_is_read(tmp_path):
    path = tar(tmp_path / "0.tar", {"0.png": PNG})
    source = open_only(tmp_path)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(OSError, match=rf"{512 + len(PNG) - 600} bytes.*0\.tar"):
        source.read(MediaRef(0, "0.tar", 512, len(PNG)))


def test_many_tars_with_few_open_files(tmp_path):
    from difftrain.data.sources.tar import Descriptors

    for i in range(9):
        tar(tmp_path / f"{i}.tar", {"0.png": PNG})
    source = open_only(tmp_path)
    source._files = Descriptors(limit=2)
    for i in list(range(9)) * 2:
        assert source.read(MediaRef(0, f"{i}.tar", 512, len(PNG))) == PNG
    assert len(source._files._open_files) == 2


# ---- parquet


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    group = columns.pop("row_group_size", 2)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return path


@pytest.mark.parametrize(
    "pictures",
    [
        [{"bytes": PNG, "path": None}, {"bytes": PNG + b"1", "path": "x.png"}, {"bytes": PNG + b"22", "path": ""}],
        [PNG, PNG + b"1", PNG + b"22"],
    ],
    ids=["struct", "binary"],
)
def test_pictures_as_bytes(tmp_path, pictures):
    table(tmp_path / "a" / "0.parquet", image=pictures, text=["one", "two", "three"], label=[1, 2, 3])
    source = open_only(tmp_path)
    items, bad = items_of(source, "a/0.parquet")
    assert not bad and {name: item.captions for name, item in items.items()} == {
        "0": ("one",),
        "1": ("two",),
        "2": ("three",),
    }
    for i, item in enumerate(items.values()):
        assert (item.offset, item.length, item.size) == (i, -1, len(PNG) + i)
        want = PNG + str(i).encode() * i
        assert source.read(MediaRef(0, "a/0.parquet", i, -1)) == want
        with item.open() as opened:
            assert opened.read() == want
    with pytest.raises(OSError, match=r"row 3 .*0\.parquet"):
        source.read(MediaRef(0, "a/0.parquet", 3, -1))


def test_pictures_as_paths(tmp_path):
    files(tmp_path / "sub", ["pictures/a.png"])
    paths = ["pictures/a.png", "pictures/gone.png", "../../secret.png", "/etc/passwd", None]
    table(tmp_path / "sub" / "0.parquet", file_name=paths, caption=["a", "b", "c", "d", "e"])
    source = open_only(tmp_path)
    items, bad = items_of(source, "sub/0.parquet")
    assert {name: item.path for name, item in items.items()} == {"0": "sub/pictures/a.png"}
    assert source.read(MediaRef(0, "sub/pictures/a.png")) == PNG
    reasons = {
        "1": ("no image", "pictures/gone.png"),
        "2": ("outside folder", "../../secret.png"),
        "3": ("outside folder", "/etc/passwd"),
        "4": ("no image", ""),
    }
    assert {name: kind(reason) for name, reason in bad.items()} == {name: what for name, (what, _) in reasons.items()}
    assert all(path in bad[name] for name, (_, path) in reasons.items())


def test_captions_of_parquet(tmp_path):
    captions = [["one", " two \n lines", ""], [], None]
    table(tmp_path / "0.parquet", image=[PNG] * 3, captions=captions)
    items, bad = items_of(open_only(tmp_path), "0.parquet")
    assert [item.captions for item in items.values()] == [("one", "two lines"), (), ()] and not bad
    table(tmp_path / "0.parquet", image=[PNG, b""], caption=[b"\xff\xfe", b"ok"])
    assert items_of(open_only(tmp_path), "0.parquet")[1] == {
        "0": "caption not UTF-8: byte 0xff at position 0 of row 0",
        "1": "empty: 0 bytes",
    }


@pytest.mark.flags("image_column", "caption_column")
def test_named_columns(tmp_path):
    table(tmp_path / "0.parquet", image=[PNG], photo=[PNG + b"2"], text=["a"], words=["b"])
    items, _ = items_of(open_only(tmp_path, image_column="photo", caption_column="words"), "0.parquet")
    assert items["0"].captions == ("b",) and items["0"].size == len(PNG) + 1


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, ("caption, text",)),
        (
            {"image_column": "pixels", "caption_column": "tags"},
            ("'pixels'", "data.image_column"),
        ),
        (
            {"image_column": "number", "caption_column": "tags"},
            ("'number'", "data.image_column"),
        ),
    ],
)
def test_a_missing_column_names_those_that_are_there(tmp_path, settings, facts):
    table(tmp_path / "0.parquet", image=[PNG], tags=["a"], number=[1])
    source = open_only(tmp_path, **settings)
    for call in (lambda: list(source.items(FileRef("0.parquet"))), lambda: source.check("0.parquet")):
        with pytest.raises(DataFault) as caught:
            call()
        assert names(caught.value, *facts)
        assert "image (binary), tags (string), number (int64)" in str(caught.value)


def test_a_damaged_parquet_is_listed(tmp_path):
    path = table(tmp_path / "0.parquet", image=[PNG], text=["a"])
    path.write_bytes(path.read_bytes()[:-20])
    source = open_only(tmp_path)
    items, bad = items_of(source, "0.parquet")
    assert not items and bad[None].startswith("damaged shard: ") and source.check("0.parquet") == ""


def test_large_row_groups_are_remarked_upon(tmp_path, monkeypatch):
    monkeypatch.setattr("difftrain.data.sources.parquet._LARGE_GROUP_MIB", 1)
    rows = [random.Random(i).randbytes(1 << 20) for i in range(4)]
    table(tmp_path / "0.parquet", image=rows, text=["a"] * 4, row_group_size=1000)
    table(tmp_path / "1.parquet", image=rows, text=["a"] * 4, row_group_size=1)
    source = open_only(tmp_path)
    assert "row_group_size=100" in source.check("0.parquet") and source.check("1.parquet") == ""


# ---- captions of several lines


LINES = " one {a|b}\n\n  two\r\nthree "


@pytest.mark.flags("enable_wildcard")
def test_with_wildcards_all_lines_of_a_caption_are_kept(tmp_path):
    folder, shards = tmp_path / "folder", tmp_path / "shards"
    files(folder, ["a.png", "a.txt"])
    (folder / "a.txt").write_text(LINES)
    sidecar = json.dumps({"caption": LINES}).encode()
    members = {"0.png": PNG, "0.txt": LINES.encode(), "1.png": PNG, "1.json": sidecar}
    tar(shards / "0.tar", members)
    table = pyarrow.table({"image": [{"bytes": PNG, "path": None}], "caption": [LINES]})
    (tmp_path / "tables").mkdir()
    parquet.write_table(table, tmp_path / "tables" / "t.parquet")
    kept = ("one {a|b}\ntwo\nthree",)
    for wildcards, of_file, of_shard in ((True, kept, kept), (False, ("one {a|b}",), ("one {a|b} two three",))):
        source = open_only(folder, enable_wildcard=wildcards)
        assert items_of(source, "a.png", "a.txt")[0][None].captions == of_file
        source = open_only(shards, enable_wildcard=wildcards)
        assert [item.captions for item in items_of(source, "0.tar")[0].values()] == [of_shard, of_shard]
        source = open_only(tmp_path / "tables", enable_wildcard=wildcards)
        assert [item.captions for item in items_of(source, "t.parquet")[0].values()] == [of_shard]


@pytest.mark.flags("caption_extension", "caption_extention")
def test_the_extension_says_which_files_hold_captions(tmp_path):
    files(tmp_path, ["a.png", "a.txt", "a.caption", "a.tags"])
    (tmp_path / "a.tags").write_text("tags")
    listed = {each.path for each in open_only(tmp_path, extension="tags").listing() if each.role == "caption"}
    assert listed == {"a.tags"}
    assert items_of(open_only(tmp_path, extension=".tags"), "a.png", "a.tags")[0][None].captions == ("tags",)
    unset = {each.path for each in open_only(tmp_path).listing() if each.role == "caption"}
    assert unset == {"a.caption", "a.txt"}
