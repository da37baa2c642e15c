"""Pictures to patches: the published arithmetic step by step, every mode, and every reason to refuse a picture."""

from __future__ import annotations

import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from workbench.base import ImageError
from workbench.serving.inputs import ImageLimits, ImageProcessor, normalise, plan_image
from workbench.spec import ImageSpec

SPEC = ImageSpec()
SMALL = ImageSpec(patch_limit=24, patch_limit_per_side=8)  # resizes nearly everything
SIZES = st.integers(1, 20_000)


def noise(width: int, height: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def picture(mode: str, width: int = 61, height: int = 43) -> Image.Image:
    channels = {"1": 1, "L": 1, "LA": 2, "P": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3}[mode]
    data = noise(width, height, channels)
    if mode == "1":
        return Image.fromarray(data[..., 0]).convert("1")
    if mode == "P":
        return Image.fromarray(noise(width, height, 3)).convert("P", palette=Image.Palette.ADAPTIVE, colors=17)
    return Image.fromarray(data[..., 0] if channels == 1 else data, mode=mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def reference_patches(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    """Pixel by pixel what the published processor does, given Pillow's own resizing and colour conversion."""
    (width, height), patch = plan_image(*image.size, spec).resized, spec.patch_size
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    is_seen_through = image.mode != "RGB" and (image.mode in ("LA", "RGBA") or "transparency" in image.info)
    source = np.asarray(image.convert("RGBA" if is_seen_through else "RGB"))
    unit = patch * spec.merge_size
    canvas = np.zeros((math.ceil(height / unit) * unit, math.ceil(width / unit) * unit, 3), np.uint8)
    for y in range(height):
        for x in range(width):
            if is_seen_through:
                board = np.float32((255, 180)[(y // 8 + x // 8) % 2])
                alpha = np.float32(source[y, x, 3]) / np.float32(255)
                canvas[y, x] = [int(alpha * np.float32(c) + (np.float32(1) - alpha) * board) for c in source[y, x, :3]]
            else:
                canvas[y, x] = source[y, x]
    rows, columns = canvas.shape[0] // patch, canvas.shape[1] // patch
    return np.stack(
        [
            canvas[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].transpose(2, 0, 1)
            for r in range(rows)
            for c in range(columns)
        ]
    )


@pytest.mark.parametrize("spec", [SPEC, SMALL], ids=["as it is", "resized"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_follows_the_published_steps(mode: str, spec: ImageSpec) -> None:
    image = picture(mode, 130, 70)
    found = ImageProcessor(spec).process(image)
    assert found.size == (130, 70)
    assert (plan_image(130, 70, spec).resized == (130, 70)) == (spec is SPEC)
    np.testing.assert_array_equal(found.patches, reference_patches(image, spec))


@pytest.mark.parametrize("spec", [SPEC, SMALL], ids=["as it is", "resized"])
@pytest.mark.parametrize("mode", ["L", "P"])
def test_a_colour_declared_transparent_shows_the_chessboard(mode: str, spec: ImageSpec) -> None:
    image = picture(mode, 80, 50)
    value = int(np.asarray(image)[0, 0])
    stored = Image.open(io.BytesIO(encoded(image, transparency=value)))
    assert stored.mode == mode
    found = ImageProcessor(spec).process(stored)
    np.testing.assert_array_equal(found.patches, reference_patches(stored, spec))
    assert not np.array_equal(found.patches, ImageProcessor(spec).process(image).patches)


def test_a_colour_declared_transparent_in_rgb_stays_a_colour() -> None:
    image = Image.new("RGB", (28, 28), (10, 20, 30))
    found = ImageProcessor(SPEC).process(encoded(image, transparency=(10, 20, 30)))
    assert np.unique(found.patches).tolist() == [10, 20, 30]


def test_transparent_black_becomes_white_and_grey_squares() -> None:
    found = ImageProcessor(SPEC).process(Image.new("RGBA", (28, 28), (0, 0, 0, 0)))
    top_left = found.patches[0, 0]
    assert top_left[0, 0] == 255  # white at the top left
    assert top_left[0, 8] == 180
    assert top_left[8, 8] == 255
    assert set(np.unique(found.patches)) == {180, 255}
    swapped = ImageSpec(white_on_top_left=False)
    assert ImageProcessor(swapped).process(Image.new("RGBA", (28, 28), (0, 0, 0, 0))).patches[0, 0, 0, 0] == 180


def test_compositing_truncates_and_does_not_round() -> None:
    # 0.5019.. * 3 + 0.498.. * 255 = 128.51 at a white square: truncated 128, rounded 129
    found = ImageProcessor(SPEC).process(Image.new("RGBA", (8, 8), (3, 3, 3, 128)))
    assert found.patches[0, :, 0, 0].tolist() == [128, 128, 128]


def test_patches_run_row_by_row_over_the_grid() -> None:
    # Every 14 x 14 block of a 3 x 5 block picture carries its own number; padding makes it a 4 x 6 grid.
    blocks = np.arange(1, 16, dtype=np.uint8).reshape(3, 5).repeat(14, 0).repeat(14, 1)
    found = ImageProcessor(SPEC).process(Image.fromarray(blocks))
    assert found.grid == (1, 4, 6)
    assert found.num_tokens == 6
    assert found.patches.max(axis=(1, 2, 3)).tolist() == [
        1, 2, 3, 4, 5, 0,
        6, 7, 8, 9, 10, 0,
        11, 12, 13, 14, 15, 0,
        0, 0, 0, 0, 0, 0,
    ]  # fmt: skip


def test_padding_is_zero_before_and_minus_one_after_normalising() -> None:
    found = ImageProcessor(SPEC).process(Image.new("RGB", (1, 1), (255, 128, 0)))
    values = normalise(found.patches, SPEC)
    assert values.dtype == np.float32
    assert values[0, :, 0, 0].tolist() == pytest.approx([1.0, 128 / 255 * 2 - 1, -1.0], abs=1e-7)
    assert np.count_nonzero(values != -1) == 2


@given(width=SIZES, height=SIZES)
@settings(deadline=None)
def test_a_plan_fits_the_limits_and_holds_the_picture(width: int, height: int) -> None:
    for spec in (SPEC, SMALL):
        plan = plan_image(width, height, spec)
        side = spec.patch_size * spec.patch_limit_per_side
        _, rows, columns = plan.grid
        for original, length in zip((width, height), plan.resized, strict=True):
            assert 1 <= length <= min(original, side)  # never enlarged
        for length, pad, count in zip(plan.resized, plan.padding, (columns, rows), strict=True):
            assert 0 <= pad < 28
            assert length + pad == count * 14
        assert plan.num_tokens * 4 == rows * columns
        if max(width, height) <= side and (width // 14) * (height // 14) <= spec.patch_limit:
            assert plan.resized == (width, height)


@pytest.mark.parametrize(("size", "tokens"), [((4000, 3000), 15_444), ((1024, 768), 1_036), ((448, 449), 272)])
def test_published_token_counts(size: tuple[int, int], tokens: int) -> None:
    assert plan_image(*size, SPEC).num_tokens == tokens


def test_a_picture_below_the_limits_keeps_its_patch_budget() -> None:
    assert plan_image(300 * 14, 200 * 14, SPEC).grid == (1, 200, 300)  # 60,000 patches; an older limit was 16,384


def test_bytes_path_and_pillow_image_give_the_same_input(tmp_path: Path) -> None:
    image, processor = picture("RGBA"), ImageProcessor(SPEC)
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(image))
    keys = {processor.process(source).key for source in (image, path, path.read_bytes())}
    assert len(keys) == 1


def test_keys_tell_apart_what_the_model_could_tell_apart() -> None:
    processor = ImageProcessor(SPEC)
    red, blue = Image.new("RGB", (30, 40), (9, 0, 0)), Image.new("RGB", (30, 40), (0, 0, 9))
    clear = Image.new("RGBA", (30, 40), (9, 0, 0, 0))
    # Black pictures of different size that pad to the same patches: the prompt names the size.
    small, large = Image.new("RGB", (27, 28)), Image.new("RGB", (28, 27))
    keys = [processor.process(image).key for image in (red, blue, clear, small, large)]
    assert len(set(keys)) == 5
    assert processor.process(red.copy()).key == keys[0]
    assert all(len(key) == 64 for key in keys)


def test_4096_similar_pictures_have_4096_keys() -> None:
    processor = ImageProcessor(SPEC)
    keys = {processor.process(Image.new("RGB", (1, 1), (i % 256, i // 256, 7))).key for i in range(4096)}
    assert len(keys) == 4096
    assert len({key[:4] for key in keys}) < 4096  # 16 bits of it would collide


def test_exif_orientation_is_not_applied() -> None:
    image = Image.new("RGB", (40, 20), (200, 10, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert ImageProcessor(SPEC).process(encoded(image, "JPEG", exif=exif)).size == (40, 20)


def png(width: int, height: int, *, depth: int = 8, data: bytes = b"\0" * 64) -> bytes:
    """An RGB PNG that claims a size and a depth, whatever data lies behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(8193, 8192), (20_000, 20_000), (2_000_000, 200)])
def test_a_bomb_is_refused_from_its_header(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded before the limit was checked"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded before the limit was checked"))
    with pytest.raises(ImageError, match="too many pixels"):
        ImageProcessor(SPEC).process(png(*size))


def test_pixel_and_byte_limits_are_the_callers_choice() -> None:
    data = encoded(picture("RGB", 50, 40))
    assert ImageProcessor(SPEC, ImageLimits(max_pixels=2000)).process(data).size == (50, 40)
    with pytest.raises(ImageError, match="too many pixels"):
        ImageProcessor(SPEC, ImageLimits(max_pixels=1999)).process(data)
    with pytest.raises(ImageError, match="too many pixels"):
        ImageProcessor(SPEC, ImageLimits(max_pixels=1999)).process(picture("RGB", 50, 40))
    with pytest.raises(ImageError, match="too large"):
        ImageProcessor(SPEC, ImageLimits(max_bytes=len(data) - 1)).process(data)
    with pytest.raises(ImageError, match="at least 1"):
        ImageLimits(max_pixels=0)


def test_a_file_above_the_byte_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read before the limit was checked"))
    with pytest.raises(ImageError, match="too large"):
        ImageProcessor(SPEC).process(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_cut_anywhere_is_refused_or_whole(kind: str) -> None:
    data = encoded(picture("RGB"), kind)
    whole = ImageProcessor(SPEC).process(data)
    refused = 0
    for length in {0, 1, 7, 20, 60, *range(100, len(data), max(1, len(data) // 23)), len(data) - 8}:
        try:
            found = ImageProcessor(SPEC).process(data[:length])
        except ImageError:
            refused += 1
        else:  # only padding behind the pixels was missing
            assert found.key == whole.key
    assert refused >= 10


@given(data=st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_end_in_an_image_or_an_image_error(data: bytes) -> None:
    for head in (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\x00\x00\x00\x00WEBP",
        b"BM",
        b"II*\x00",
    ):
        try:
            ImageProcessor(SPEC).process(head + data)
        except ImageError:
            continue


@given(
    place=st.integers(0, 10_000),
    value=st.integers(0, 255),
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP"]),
)
@settings(deadline=None)
def test_one_damaged_byte_never_escapes_as_another_error(place: int, value: int, kind: str) -> None:
    data = bytearray(encoded(picture("RGB", 20, 17), kind))
    data[place % len(data)] = value
    try:
        ImageProcessor(SPEC).process(bytes(data))
    except ImageError:
        return


def frames(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (20, 20), (40 * i, 0, 0)) for i in range(count)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_pages_are_refused_by_name(kind: str) -> None:
    first, *rest = frames(3)
    with pytest.raises(ImageError, match="animated or of several pages"):
        ImageProcessor(SPEC).process(encoded(first, kind, save_all=True, append_images=rest))
    assert ImageProcessor(SPEC).process(encoded(first, kind)).size == (20, 20)


def test_a_phone_picture_with_a_preview_is_one_picture() -> None:
    first, *rest = frames(2)
    found = ImageProcessor(SPEC).process(encoded(first, "MPO", save_all=True, append_images=rest))
    assert found.key == ImageProcessor(SPEC).process(encoded(first, "JPEG")).key


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (Image.new("RGB", (0, 5)), "without pixels"),
        (Image.new("RGB", (5, 0)), "without pixels"),
        (Image.new("I;16", (5, 5)), "I;16"),
        (Image.new("I", (5, 5)), "no safe conversion"),
        (Image.new("F", (5, 5)), "no safe conversion"),
        (Image.new("LAB", (5, 5)), "LAB"),
        (Image.new("PA", (5, 5)), "PA"),
        (b"", "not a readable picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not a readable picture"),
        ("picture.png", "str"),
        (Path("/nowhere/picture.png"), "no such file"),
        (Path("/"), "no such file"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(image: object, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        ImageProcessor(SPEC).process(image)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "entry"), [("L", b"\0\x80"), ("1", b"\0"), ("P", (0, 0, 0))])
def test_a_transparency_entry_of_another_kind_is_refused_by_mode(mode: str, entry: object) -> None:
    image = Image.new(mode, (5, 5))
    image.info["transparency"] = entry
    with pytest.raises(ImageError, match=rf"cannot be converted.*found {mode}"):
        ImageProcessor(SPEC).process(image)


@pytest.mark.parametrize("size", [(1 << 26, 1), (1, 1 << 26), ((1 << 16) + 1, 1)])
def test_a_picture_too_long_to_shrink_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match=f"too long.*{size[0]} x {size[1]}"):
        ImageProcessor(SPEC).process(png(*size, data=b""))


def test_sixteen_bit_grey_is_refused_and_sixteen_bit_colour_read_by_its_high_bytes() -> None:
    grey = encoded(Image.fromarray(np.full((9, 9), 30_000, np.uint16)))
    with pytest.raises(ImageError, match="I;16"):
        ImageProcessor(SPEC).process(grey)
    rows = b"".join(b"\0" + bytes.fromhex("12ff 34ff 56ff") * 4 for _ in range(3))
    colour = ImageProcessor(SPEC).process(png(4, 3, depth=16, data=rows))
    assert colour.patches[0, :, 2, 3].tolist() == [0x12, 0x34, 0x56]


def test_a_size_without_pixels_has_no_plan() -> None:
    with pytest.raises(ImageError, match="0 x 3"):
        plan_image(0, 3, SPEC)
