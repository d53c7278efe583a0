"""Bytes of the feature cache: headers, journal rows, payloads."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.cache.store import format as f


def stored(name="latents", dtype="float32", shape=(4, 8, 8), rows=4, size=1024, scales=None, codec=""):
    data = np.frombuffer(np.random.default_rng(size).bytes(size), np.uint8)
    return f.StoredFeature(name, dtype, shape, rows, data, scales, codec)


def joined(pieces):
    return np.frombuffer(b"".join(bytes(piece) for piece in pieces), np.uint8)


def same(left, right):
    assert (left.name, left.dtype, left.shape, left.rows, left.codec) == (
        right.name,
        right.dtype,
        right.shape,
        right.rows,
        right.codec,
    )
    assert np.array_equal(left.data, right.data)
    assert (left.scales is None) == (right.scales is None)
    if left.scales is not None:
        assert left.scales.dtype == np.float32 and np.array_equal(left.scales, right.scales)


def test_the_checksum_is_crc32c_of_any_buffer():
    assert f.crc32c(b"123456789") == 0xE3069283
    assert f.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert f.crc32c(b"6789", f.crc32c(b"12345")) == 0xE3069283


def test_a_header_says_what_it_was_given():
    block = f.header_block({"segment": "seg-1", "encoder": "latents"})
    assert len(block) % f.ALIGN == 0 and f.header_size(block[: f.HEADER_START]) == len(block)
    assert f.read_header(block + b"more") == ({"format": 1, "segment": "seg-1", "encoder": "latents"}, len(block))


def test_a_header_cut_or_changed_anywhere_is_noticed():
    block = f.header_block({"segment": "seg-1"})
    for size in range(len(block)):
        with pytest.raises(f.Damaged):
            f.read_header(block[:size])
    words = 32 + len(b'{"format": 1, "segment": "seg-1"}')
    for place in range(words):
        changed = bytearray(block)
        changed[place] ^= 4
        if 20 <= place < 24:  # the size of the block: caught unless it is still large enough and aligned
            changed[place] = 1
        with pytest.raises(f.Damaged):
            f.read_header(bytes(changed))


def test_another_format_is_named():
    block = bytearray(f.header_block({}))
    block[16] = 9
    with pytest.raises(f.OtherFormat, match=r"format 9, .*format 1"):
        f.read_header(bytes(block))


@given(st.lists(st.binary(min_size=44, max_size=44), max_size=5))
@settings(max_examples=50, deadline=None)
def test_checksums_of_rows_are_those_of_their_bytes(bodies):
    rows = np.frombuffer(b"".join(body + bytes(4) for body in bodies), f.ROW)
    assert f.ROW.itemsize == 48
    assert f.row_crcs(rows).tolist() == [google_crc32c.value(body) for body in bodies]


def test_a_row_is_right_until_any_bit_of_it_changes():
    row = np.zeros(1, f.ROW)
    row[0] = (b"0123456789abcdef", 640, 12345, 7, 1, 0, 0)
    row["row_crc"] = f.row_crcs(row)
    content = row.tobytes()
    assert f.whole_rows(content + b"torn")[1].tolist() == [True]
    for bit in range(48 * 8):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        assert f.whole_rows(bytes(changed))[1].tolist() == [False], bit
    assert f.whole_rows(bytes(48))[1].tolist() == [False], "a block of zeros, as a power cut leaves it, is no row"


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)


@given(
    st.lists(st.tuples(shapes, st.integers(0, 300), st.booleans(), st.sampled_from(["", "zlib"])), max_size=6),
    st.dictionaries(st.text(max_size=5), st.text(max_size=50), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_what_is_packed_is_unpacked(specs, meta):
    features = []
    for number, (shape, size, scaled, codec) in enumerate(specs):
        scales = np.arange(shape[0] if len(shape) > 1 else 1, dtype=np.float32) + 0.5 if scaled else None
        features.append(stored(f"feature_{number}", "bfloat16", shape, shape[0], size, scales, codec))
    payload = joined(f.pack(features, meta))
    found = f.unpack(payload)
    assert len(found) == len(features) and f.meta_of(payload) == meta
    for left, right in zip(found, features):
        same(left, right)


def test_data_lies_aligned_and_is_not_copied():
    payload = joined(
        f.pack([stored(size=100), stored("b", size=77, scales=np.ones(4, np.float32))], {"name": "x" * 99})
    )
    for each in f.unpack(payload):
        assert (each.data.ctypes.data - payload.ctypes.data) % 64 == 0
        assert np.shares_memory(each.data, payload)
        assert each.scales is None or (each.scales.ctypes.data - payload.ctypes.data) % 64 == 0


def test_only_leading_rows_and_none_at_all():
    none = f.StoredFeature("hidden", "bfloat16", (77, 8), 0, np.zeros(0, np.uint8), np.zeros(0, np.float32))
    some = stored("hidden_2", "bfloat16", (77, 8), 5, 80)
    found = f.unpack(joined(f.pack([none, some], {})))
    same(found[0], none)
    same(found[1], some)


def test_a_name_of_any_length_and_script():
    each = stored("хидден" * 50)
    same(f.unpack(joined(f.pack([each], {})))[0], each)


def test_seven_axes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"latents has 7 axes, .* 6$"):
        f.pack([stored(shape=(1,) * 7)], {})


@pytest.mark.parametrize("payload", [b"", b"ftr", b"{}" * 50, bytes(64)])
def test_other_bytes_are_no_features(payload):
    with pytest.raises(f.Damaged):
        f.unpack(np.frombuffer(payload, np.uint8))


def test_a_rejected_entry_says_name_and_reason():
    item = f.reject(b"a" * 16, "täglich.jpg", "cut short")
    assert item.kind == f.REJECT and f.rejected(joined(item.pieces)) == ("täglich.jpg", "cut short")
