"""Decoding: every odd kind of picture comes out as the RGB a viewer shows, or is refused by name."""

import io
import re
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps
from rejects import kind

from difftrain.data.media.media import MIN_SIDE, Unusable, decode, probe

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (30, 40, 3), dtype=np.uint8)
FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]


def encode(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def kind_of(call, *args, **options):
    with pytest.raises(Unusable) as caught:
        call(*args, **options)
    return kind(caught.value.kind)


def over_white(colour, alpha):
    """Composite in exact arithmetic."""
    return np.floor((colour.astype(np.int64) * alpha + 255 * (255 - alpha.astype(np.int64))) / 255 + 0.5)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF"])
def test_lossless_rgb_is_itself(form):
    assert (decode(encode(Image.fromarray(NOISE), form)) == NOISE).all()


def test_transparency_is_composited_over_white():
    alpha = RNG.integers(0, 256, (30, 40, 1), dtype=np.uint8)
    want = over_white(NOISE, alpha)
    assert (decode(encode(Image.fromarray(np.dstack([NOISE, alpha])))) == want).all()
    grey = np.dstack([NOISE[..., :1], alpha])
    assert (decode(encode(Image.fromarray(grey, "LA"))) == over_white(grey[..., :1], alpha)).all()
    lossless = encode(Image.fromarray(np.dstack([NOISE, alpha])), "WEBP", lossless=True, exact=True)
    assert (decode(lossless) == want).all()


def test_compositing_comes_before_resizing():
    """Half transparent black above opaque white: resized as colours, black would bleed into the white half."""
    from difftrain.data.media.media import fit

    rgba = np.zeros((64, 64, 4), np.uint8)
    rgba[32:] = 255
    pixels = fit(decode(encode(Image.fromarray(rgba))), (16, 16), (0, 0, 16, 16))
    assert (pixels == 255).all()


def test_palettes_and_their_transparency():
    indexed = Image.fromarray(NOISE).quantize(16)
    want = np.asarray(indexed.convert("RGB"))
    assert (decode(encode(indexed)) == want).all()
    one = encode(indexed, transparency=3)
    hidden = np.asarray(indexed) == 3
    assert hidden.any() and (decode(one) == np.where(hidden[..., None], 255, want)).all()
    many = encode(indexed, transparency=bytes(range(0, 256, 16)))
    alpha = np.asarray(indexed)[..., None] * 16
    assert (decode(many) == over_white(want, alpha)).all()


def test_one_transparent_colour_of_rgb_and_grey():
    rgb = np.array([[[10, 20, 30], [1, 2, 3]]] * 16, np.uint8).repeat(8, axis=1)
    got = decode(encode(Image.fromarray(rgb), transparency=(10, 20, 30)))
    assert (got[:, :8] == 255).all() and (got[:, 8:] == rgb[:, 8:]).all()
    grey = rgb[..., 0]
    got = decode(encode(Image.fromarray(grey), transparency=10))
    assert (got[:, :8] == 255).all() and (got[:, 8:] == 1).all()


def test_one_bit_and_grey():
    bits = NOISE[..., 0] > 127
    assert (decode(encode(Image.fromarray(bits))) == np.where(bits, 255, 0)[..., None]).all()
    assert (decode(encode(Image.fromarray(NOISE[..., 0]))) == NOISE[..., :1]).all()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(form):
    values = np.arange(256 * 256, dtype=np.uint16).reshape(256, 256)
    want = np.floor(values / 257 + 0.5)
    got = decode(encode(Image.fromarray(values), form))
    assert (got == want[..., None]).all()
    assert got.max() == 255 and np.unique(got).size == 256


def test_sixteen_bit_colour():
    """Pillow keeps the high byte: at most one level from rounding."""
    values = RNG.integers(0, 1 << 16, (20, 24, 3), dtype=np.uint16)
    got = decode(png_of_16_bit_rgb(values))
    assert np.abs(got - np.floor(values / 257 + 0.5)).max() <= 1


def png_of_16_bit_rgb(values):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_pixels_without_an_agreed_scale_are_refused():
    assert kind_of(decode, encode(Image.fromarray(NOISE[..., 0].astype(np.float32)), "TIFF")) == "unsupported pixels"
    assert kind_of(decode, encode(Image.fromarray(NOISE[..., 0].astype(np.int32)), "TIFF")) == "unsupported pixels"


def test_cmyk_both_ways_round():
    """A JPEG of four channels is stored inverted (Adobe), a TIFF is not: both show the same colours."""
    flat = Image.new("RGB", (64, 64), (200, 60, 30)).convert("CMYK")
    for form, tolerance in (("JPEG", 4), ("TIFF", 0)):
        assert np.abs(decode(encode(flat, form)).astype(int) - (200, 60, 30)).max() <= tolerance, form


def test_lab():
    transform = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(Image.new("RGB", (32, 32), (180, 90, 40)), transform)
    assert np.abs(decode(encode(lab, "TIFF")).astype(int) - (180, 90, 40)).max() <= 3


UPRIGHT = np.dstack([np.add.outer(np.arange(32) * 4, np.arange(48) * 2), np.full((32, 48), 90), np.zeros((32, 48))])
UNDO = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}  # the orientation whose turn brings a picture there


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_eight_orientations_give_one_picture(form):
    upright = Image.fromarray(UPRIGHT.astype(np.uint8))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright
        if orientation > 1:
            tagged = upright.copy()
            tagged.getexif()[0x0112] = UNDO[orientation]
            stored = ImageOps.exif_transpose(tagged)
        options = {"quality": 100, "subsampling": "4:4:4"} if form in ("JPEG", "AVIF") else {}
        options |= {"lossless": True} if form == "WEBP" else {}
        data = encode(stored, form, exif=exif, **options)
        got = decode(data)
        assert got.shape == UPRIGHT.shape
        assert np.abs(got.astype(int) - UPRIGHT).mean() < 2, orientation
        if form != "TIFF":  # whose size is taken from the pixels
            assert probe(data).size_wh == (48, 32), orientation


def test_exif_behind_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, tagged = encode(Image.fromarray(NOISE)), encode(Image.fromarray(NOISE), exif=exif)
    at = tagged.index(b"eXIf") - 4
    chunk = tagged[at : at + 12 + int.from_bytes(tagged[at : at + 4], "big")]
    late = plain[:-12] + chunk + plain[-12:]
    assert decode(late).shape == (40, 30, 3) and probe(late).size_wh == (30, 40)
    assert (decode(late) == decode(tagged)).all()


def test_damaged_exif_leaves_the_picture():
    data = encode(Image.fromarray(NOISE), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (decode(data) == NOISE).all()


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_picture(form):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], duration=50, **options)
    assert (decode(data) == (255, 0, 0)).all()
    assert probe(data).size_wh == (20, 20)


def test_of_several_pages_the_first():
    pages = [Image.new("L", (20, 20), value) for value in (7, 200)]
    assert (decode(encode(pages[0], "TIFF", save_all=True, append_images=pages[1:])) == 7).all()


@pytest.mark.parametrize("form", FORMATS)
def test_headers_tell_the_size(form):
    data = encode(Image.fromarray(NOISE), form)
    found = probe(data)
    assert found.size_wh == (40, 30) and found.format == form
    assert found.is_complete == (form in ("PNG", "JPEG", "WEBP", "GIF"))


def test_webp_headers_of_every_kind():
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb, rgba = Image.fromarray(NOISE), Image.fromarray(NOISE).convert("RGBA")
    for image in (rgb, rgba):
        for lossless in (False, True):
            for more in ({}, {"exif": exif}):
                data = encode(image, "WEBP", lossless=lossless, **more)
                size = (30, 40) if more else (40, 30)
                assert probe(data).size_wh == size and decode(data).shape[:2] == size[::-1]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_cut_file_is_refused_or_whole(form):
    """Wherever it is cut: what probe calls whole decodes, and half a picture never does."""
    data = encode(Image.fromarray(NOISE), form)
    for keep in (1, 5, 12, 20, 40, len(data) // 3, len(data) // 2, len(data) - 40):
        assert kind_of(decode, data[:keep]) in ("truncated", "broken", "not image"), keep
    for keep in range(len(data) - 40, len(data)):
        try:
            whole = probe(data[:keep]).is_complete
        except Unusable:
            continue
        if whole:
            decode(data[:keep])


def test_a_thumbnail_is_no_end_of_the_picture():
    exif = b"Exif\0\0" + encode(Image.fromarray(NOISE), "JPEG")
    data = encode(Image.fromarray(NOISE), "JPEG", exif=exif)
    assert data.count(b"\xff\xd9") == 2
    cut = data[: data.rindex(b"\xff\xd9") - 200]
    assert cut.count(b"\xff\xd9") == 1 and not probe(cut).is_complete and kind_of(decode, cut) == "truncated"


def test_bytes_behind_a_picture_are_no_fault():
    data = encode(Image.fromarray(NOISE), "JPEG") + b"camera's own" * 50
    assert probe(data).is_complete and decode(data).shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"empty: 0 bytes"),
        (b"a photo of a cat\n", r"not .* text"),
        (b"<!DOCTYPE html><html>404", r"not .* HTML"),
        (b"<svg xmlns='x'>", r"not .* SVG"),
        (bytes(4096), r"not .* zero bytes"),
        (b"\x7fELF\x02\x01\x01" + bytes(20), r"not .* 7f 45"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", r"not .* text"),
    ],
)
def test_what_is_no_picture_is_called_what_it_is(data, reason):
    for call in (decode, probe):
        with pytest.raises(Unusable) as caught:
            call(data)
        assert re.match(reason, str(caught.value))


def bomb(width, height):
    """A PNG whose header promises width x height and whose file is tiny."""
    data = bytearray(encode(Image.new("1", (16, 16))))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize("size", [(12_000, 9_000), (30_000, 30_000), (1 << 30, 1 << 30)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size):
    before = Image.MAX_IMAGE_PIXELS
    assert kind_of(decode, bomb(*size)) == "too pixels"
    assert kind_of(probe, bomb(*size)) == "too pixels"
    assert before == Image.MAX_IMAGE_PIXELS
    webp = bytearray(encode(Image.fromarray(np.dstack([NOISE, NOISE[..., 0]])), "WEBP"))
    webp[24:30] = (16_000).to_bytes(3, "little") * 2
    assert kind_of(probe, bytes(webp)) == "too pixels"


def test_the_limit_may_be_lowered():
    data = encode(Image.fromarray(NOISE))
    assert kind_of(decode, data, max_pixels=NOISE[..., 0].size - 1) == "too pixels"
    assert decode(data, max_pixels=NOISE[..., 0].size).shape == NOISE.shape


def test_small_sides_are_refused_by_their_header():
    for size in ((1, 10_000), (10_000, 1), (MIN_SIDE - 1, 400)):
        assert kind_of(probe, encode(Image.new("RGB", size))) == "too small"
    assert probe(encode(Image.new("RGB", (MIN_SIDE, MIN_SIDE)))).size_wh == (MIN_SIDE, MIN_SIDE)


def test_threads_decode_alike():
    datas = [encode(Image.fromarray(NOISE), form) for form in FORMATS] * 4
    want = [decode(data) for data in datas]
    got = [None] * len(datas)

    def work(first):
        for i in range(first, len(datas), 4):
            got[i] = decode(datas[i])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


def test_a_reason_survives_pickling():
    import pickle

    reason = pickle.loads(pickle.dumps(Unusable("broken", "a: b: c")))
    assert str(reason) == "broken: a: b: c" and reason.kind == "broken"
