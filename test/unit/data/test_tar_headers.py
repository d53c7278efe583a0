"""Tar headers: the standard library's reader as oracle for what is whole, and what is said of what isn't."""

import io
import os
import random
import re
import tarfile

import pytest

from difftrain.data.sources.tar_headers import Member, TarDamage, read_members

LONG = "a folder with a long name/" * 6 + "picture 0001.jpg"
UNICODE = "日本語/ünï – " + "ø" * 60 + ".jpg"


def add(tar, name, data=b"", **more):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))


def write(path, members, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            add(tar, name, data)
    return path


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_offsets_and_names_are_the_librarys(tmp_path, form):
    rng = random.Random(0)
    names = ["a.jpg", "dir/b.txt", "./c.png", "x" * 100, "p" * 60 + "/" + "n" * 90]
    names += [LONG, UNICODE, "x" * 300] if form != tarfile.USTAR_FORMAT else ["ü.jpg"]
    path = write(tmp_path / "a.tar", [(name, rng.randbytes(rng.randint(0, 2000))) for name in names], form)
    found = list(read_members(path))
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        for got, want in zip(found, tar, strict=True):
            assert (got.name, got.offset, got.size) == (want.name, want.offset_data, want.size)
            assert got.kind == "a file" and not got.fault
            assert data[got.offset : got.offset + got.size] == tar.extractfile(want).read()
    assert [member.name for member in found] == names


def test_what_is_no_plain_file(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "dir", type=tarfile.DIRTYPE)
        add(tar, "soft.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "hard.jpg", type=tarfile.LNKTYPE, linkname="other.jpg")
        add(tar, "pipe.jpg", type=tarfile.FIFOTYPE)
        add(tar, "a.jpg", b"data")
    found = {member.name: member for member in read_members(tmp_path / "a.tar")}
    assert not found["a.jpg"].fault
    for name, what in (
        ("dir/", "folder"),
        ("soft.jpg", "symbolic link"),
        ("hard.jpg", "hard link"),
        ("pipe.jpg", "pipe"),
    ):
        assert what in found[name].fault, name


def test_a_sparse_member_is_not_taken_for_its_bytes(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "a.jpg", b"x" * 10, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    assert "holes" in next(read_members(tmp_path / "a.tar")).fault


def test_a_size_above_eight_gigabytes(tmp_path):
    """Sizes that octal digits can't hold stand in binary (GNU) or in a pax header; the file need not be there."""
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("big.jpg")
        info.size = 9 << 30
        (tmp_path / "a.tar").write_bytes(info.tobuf(form))
        member = next(read_members(tmp_path / "a.tar"))
        assert member.size == 9 << 30 and member.fault.startswith("truncated")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_cut_anywhere_what_is_whole_stays(tmp_path, form):
    members = [("a.jpg", b"1" * 700), (LONG, b"2" * 100), ("c.jpg", b"3" * 512)]
    whole = write(tmp_path / "whole.tar", members, form).read_bytes()
    places = [(m.name, m.offset, m.size) for m in read_members(tmp_path / "whole.tar")]
    end = places[-1][1] + 512  # behind it come only zero blocks
    for keep in range(0, len(whole), 37):
        (tmp_path / "cut.tar").write_bytes(whole[:keep])
        found = list(read_members(tmp_path / "cut.tar"))
        good = [m.name for m in found if isinstance(m, Member) and not m.fault]
        assert good == [name for name, offset, size in places if offset + size <= keep], keep
        said = [m for m in found if isinstance(m, TarDamage) or m.fault]
        assert bool(said) == (keep < end + 512), keep


def test_damage_in_the_middle_is_named_and_what_came_before_is_kept(tmp_path):
    path = write(tmp_path / "a.tar", [(f"{i}.jpg", bytes(600)) for i in range(5)])
    data = bytearray(path.read_bytes())
    third = [m for m in read_members(path)][2].offset - 512
    data[third : third + 512] = random.Random(1).randbytes(512)
    path.write_bytes(data)
    *good, last = read_members(path)
    assert [m.name for m in good] == ["0.jpg", "1.jpg"]
    assert isinstance(last, TarDamage) and f"byte {third}" in last.reason and last.reason.startswith("damaged shard: ")


def test_random_bytes_never_do_worse_than_damage(tmp_path):
    rng = random.Random(2)
    whole = write(tmp_path / "whole.tar", [(LONG, b"1" * 700), ("b.jpg", b"2")]).read_bytes()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "a.tar").write_bytes(data)
        for member in read_members(tmp_path / "a.tar"):
            assert isinstance(member, TarDamage) or member.fault or member.offset + member.size <= len(data)


def test_a_file_that_is_no_tar(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"not a tar " * 400)
    (found,) = read_members(tmp_path / "a.tar")
    assert re.match(r"damaged shard: .* byte 0\b", found.reason)
    (tmp_path / "a.tar").write_bytes(b"")
    (found,) = read_members(tmp_path / "a.tar")
    assert found.reason.startswith("truncated shard: ")


def resealed(data, at, size_field):
    """A tar with another size in the header at a byte, and the checksum that goes with it."""
    header = bytearray(data[at : at + 512])
    header[124:136] = size_field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + 512 :]


HUGE = {
    "base 256": b"\x80" + b"\xff" * 11, "negative": b"\xff" * 12, "octal": b"77777777777\0", "no octal": b"99999999999\0",
    "text": b"size in text", "2 ** 63": b"\x80" + (1 << 63).to_bytes(11, "big"),
}  # fmt: skip


@pytest.mark.parametrize("field", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_header_may_say_any_size(tmp_path, field, form):
    path = write(tmp_path / "a.tar", [("a.jpg", b"1" * 600), (LONG, b"2" * 600), ("c.jpg", b"3")], form)
    data = path.read_bytes()
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    assert len(headers) == 4, "that of the long name too"
    for at, whole in zip(headers, ([], ["a.jpg"], ["a.jpg"], ["a.jpg", LONG]), strict=True):
        path.write_bytes(resealed(data, at, field))
        *before, last = read_members(path)
        assert isinstance(last, TarDamage) and not any(isinstance(member, TarDamage) for member in before)
        assert [m.name for m in before if not m.fault] == whole


@pytest.mark.parametrize("size", ["²", "1" * 5000, "-1", "0x5", "", "1_0"])
def test_a_pax_size_that_is_none(tmp_path, size):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "a.jpg", b"x" * 10)
        add(tar, "b.jpg", b"x" * 10, pax_headers={"size": size})
    first, last = read_members(tmp_path / "a.tar")
    assert first.name == "a.jpg" and isinstance(last, TarDamage) and last.reason.startswith("damaged shard: ")


def test_archives_one_behind_another_are_read(tmp_path):
    names = ["a.jpg", "b.jpg", LONG, "c.jpg"]
    parts = [write(tmp_path / f"{i}.tar", [(name, name.encode())]).read_bytes() for i, name in enumerate(names)]
    path = tmp_path / "all.tar"
    path.write_bytes(b"".join(parts))
    data = path.read_bytes()
    found = list(read_members(path))
    assert [member.name for member in found] == names
    assert all(data[m.offset : m.offset + m.size] == m.name.encode() for m in found)


@pytest.mark.parametrize("rest", [b"x" * 100, b"x" * 512, bytes(512) + b"something else" * 80], ids=len)
def test_what_stands_behind_the_end_mark_is_told(tmp_path, rest):
    path = write(tmp_path / "a.tar", [("a.jpg", b"1")])
    path.write_bytes(path.read_bytes() + rest)
    first, last = read_members(path)
    assert first.name == "a.jpg" and isinstance(last, TarDamage)


def test_zeros_without_an_end(tmp_path):
    path = write(tmp_path / "a.tar", [("a.jpg", b"1")])
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    first, last = read_members(path)
    assert first.name == "a.jpg" and isinstance(last, TarDamage)


def test_a_pipe_is_no_tar(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(OSError):
        list(read_members(tmp_path / "a.tar"))
