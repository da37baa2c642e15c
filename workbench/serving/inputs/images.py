"""From a picture to the patches the vision tower reads, following the published K3 image processor byte for byte.

Size: a picture that fits the limits is never resized, a larger one is shrunk until it fits, and none is enlarged. Then
it is padded on the right and below with zero bytes to whole merged patches.

    scale = min(1, sqrt(patch_limit / (max(1, W // p) * max(1, H // p))), side_limit * p / W, side_limit * p / H)

Order of steps: resize in the picture's own mode (Pillow weighs colours by alpha while it resamples, and takes the
nearest pixel of a palette picture), composite what is transparent over a chessboard, convert to RGB, pad, cut.

Kimi-K2.5 differs in its budget of patches, and drops the alpha plane before it resizes.

Two things the published processor leaves out, and so does this one: EXIF orientation (a phone picture that relies on
the tag is seen turned) and the one colour that an RGB picture may declare transparent.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from workbench.base import ImageError
from workbench.spec import ImageSpec

__all__ = ["ImageInput", "ImageLimits", "ImagePlan", "ImageProcessor", "ImageSource", "normalise", "plan_image"]

ImageSource = Image.Image | bytes | Path

# Formats whose decoders are safe to expose. EPS starts an interpreter, others are rare and little tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Modes with a meaning as colours of 8 bits. The rest (16-bit and float greys, LAB, palettes with a separate alpha
# plane) would be converted by clipping or by mixing palette indices.
MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """What a picture may cost before anything is decoded; all are checked against the header alone."""

    max_pixels: int = 1 << 26  # 8192 x 8192; the published processor keeps at most 7168 x 7168 of it
    max_bytes: int = 64 << 20  # of the compressed file
    max_side: int = 1 << 16  # shrinking one row of 2**26 pixels takes gigabytes of weights; a JPEG ends at 65535

    def __post_init__(self) -> None:
        if min(self.max_pixels, self.max_bytes, self.max_side) < 1:
            raise ImageError(f"limits must be at least 1, not {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """What becomes of a picture of a given size: pure arithmetic, no pixels needed."""

    resized: tuple[int, int]  # width, height
    padding: tuple[int, int]  # right, bottom
    grid: tuple[int, int, int]  # frames, rows, columns of patches
    num_tokens: int  # after merging


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageInput:
    """A picture ready for the vision tower.

    `patches` are (N, 3, p, p) uint8 before normalising, row-major over the grid; `size` is the original width and
    height, which the prompt names; `key` is a sha256 over grid, size and patches: equal keys mean equal features.
    """

    patches: NDArray[np.uint8]
    grid: tuple[int, int, int]
    size: tuple[int, int]
    num_tokens: int
    key: str


def plan_image(width: int, height: int, spec: ImageSpec) -> ImagePlan:
    """Resized size, padding, grid and token count of a `width` x `height` picture. Raises ImageError below 1 x 1."""
    if width < 1 or height < 1:
        raise ImageError("picture without pixels", found=f"{width} x {height}", expected="at least 1 x 1")
    patch, side = spec.patch_size, spec.patch_limit_per_side * spec.patch_size
    area = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(spec.patch_limit / area), side / width, side / height)
    resized = (min(side, max(1, int(width * scale))), min(side, max(1, int(height * scale))))
    unit = spec.merge_size * patch
    padding = (-resized[0] % unit, -resized[1] % unit)
    columns, rows = ((length + pad) // patch for length, pad in zip(resized, padding, strict=True))
    return ImagePlan(
        resized=resized, padding=padding, grid=(1, rows, columns), num_tokens=rows * columns // spec.merge_size**2
    )


def normalise(patches: NDArray[np.uint8], spec: ImageSpec) -> NDArray[np.float32]:
    """Bytes to what the tower computes with: (N, 3, p, p) uint8 -> float32 of the same shape, in [-1, 1] for K3."""
    mean, std = (np.array(x, np.float32).reshape(3, 1, 1) for x in (spec.mean, spec.std))
    return (patches.astype(np.float32) / np.float32(255) - mean) / std


class ImageProcessor:
    """Decodes, resizes, composites, pads and cuts pictures. Holds no state: safe to share between threads."""

    def __init__(self, spec: ImageSpec, limits: ImageLimits | None = None) -> None:
        self.spec = spec
        self.limits = limits or ImageLimits()

    def process(self, source: ImageSource) -> ImageInput:
        """Patches of one picture, given as a Pillow image, as the bytes of a file, or as the path of one.

        Raises ImageError for anything that is no single still picture of 8-bit colours within the limits: not an image,
        truncated, animated, without pixels, too many pixels or bytes (both found before decoding), an unusable mode.
        """
        image, where = _decoded(source, self.limits)
        plan = plan_image(image.width, image.height, self.spec)
        try:
            patches = self._patches(image, plan)
        except MemoryError:
            raise
        except Exception as error:  # such as a transparency entry of another kind than the mode has
            raise ImageError(f"picture cannot be converted: {error}", where=where, found=image.mode) from error
        head = repr((plan.grid, image.size)).encode()
        return ImageInput(
            patches=patches,
            grid=plan.grid,
            size=image.size,
            num_tokens=plan.num_tokens,
            key=hashlib.sha256(head + patches.tobytes()).hexdigest(),
        )

    def _patches(self, image: Image.Image, plan: ImagePlan) -> NDArray[np.uint8]:
        if not self.spec.has_chessboard:
            image = image.convert("RGB")
        pixels = np.asarray(_opaque(image.resize(plan.resized, Image.Resampling.BICUBIC), self.spec))
        right, bottom = plan.padding
        pixels = np.pad(pixels, ((0, bottom), (0, right), (0, 0)))
        _, rows, columns = plan.grid
        patch = self.spec.patch_size
        cut = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(cut.reshape(rows * columns, 3, patch, patch))


def _opaque(image: Image.Image, spec: ImageSpec) -> Image.Image:
    """RGB, with transparent parts composited over the chessboard in float32 and truncated (not rounded) to bytes."""
    has_alpha = "A" in image.getbands() or "transparency" in image.info
    if image.mode == "RGB" or not has_alpha:
        return image.convert("RGB")
    rgba = np.asarray(image.convert("RGBA"))
    rows, columns = (np.arange(length) // spec.chessboard_square for length in rgba.shape[:2])
    is_odd = ((rows[:, None] + columns[None, :]) % 2).astype(bool)
    is_white = ~is_odd if spec.white_on_top_left else is_odd
    board = np.where(is_white, spec.chessboard_white, spec.chessboard_grey).astype(np.uint8)[:, :, None]
    alpha = rgba[:, :, 3:].astype(np.float32) / np.float32(255)
    return Image.fromarray((alpha * rgba[:, :, :3] + (1 - alpha) * board).astype(np.uint8))


def _decoded(source: ImageSource, limits: ImageLimits) -> tuple[Image.Image, str]:
    """The picture with its pixels in memory, and its name; every reason to refuse it becomes an ImageError."""
    image, where = _opened(source, limits)
    if image.width < 1 or image.height < 1:
        raise ImageError("picture without pixels", where=where, found=f"{image.width} x {image.height}")
    if image.width * image.height > limits.max_pixels:
        raise ImageError(
            "picture has too many pixels",
            where=where,
            found=f"{image.width} x {image.height} = {image.width * image.height:,}",
            expected=f"at most {limits.max_pixels:,}",
            next_step="Shrink it before sending it",
        )
    if max(image.size) > limits.max_side:
        raise ImageError(
            "picture is too long",
            where=where,
            found=f"{image.width} x {image.height}",
            expected=f"at most {limits.max_side:,} on a side",
            next_step="Cut it into pieces",
        )
    if image.mode not in MODES:
        raise ImageError(
            "picture mode has no safe conversion to 8-bit colours",
            where=where,
            found=image.mode,
            expected=f"one of {', '.join(sorted(MODES))}",
            next_step="Convert it to RGB or RGBA with the value range you mean",
        )
    try:
        # An MPO is how phones store a JPEG with a preview or a second eye; its first picture is the picture.
        is_animated = getattr(image, "is_animated", False) and image.format != "MPO"
        if not is_animated:
            image.load()
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, ...
        raise ImageError(f"picture cannot be decoded: {error}", where=where, found=image.format) from error
    if is_animated:
        raise ImageError(
            "animated or of several pages",
            where=where,
            found=f"{image.format} with more than one frame",
            expected="one still picture",
            next_step="Send the frame you mean",
        )
    return image, where


def _opened(source: ImageSource, limits: ImageLimits) -> tuple[Image.Image, str]:
    if isinstance(source, Image.Image):
        return source, "Pillow image"
    if isinstance(source, Path):
        where = str(source)
        try:
            if not source.is_file():
                raise ImageError("no such file", where=where)
            num_bytes = source.stat().st_size
            data = source.read_bytes() if num_bytes <= limits.max_bytes else b""
        except OSError as error:
            raise ImageError(f"file cannot be read: {error}", where=where) from error
    elif isinstance(source, (bytes, bytearray, memoryview)):
        where, num_bytes, data = "image bytes", len(source), bytes(source)
    else:
        raise ImageError("not a picture", found=type(source).__name__, expected="a Pillow image, bytes or a Path")
    if num_bytes > limits.max_bytes:
        raise ImageError(
            "file is too large", where=where, found=f"{num_bytes:,} bytes", expected=f"at most {limits.max_bytes:,}"
        )
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS), where
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("picture has too many pixels", where=where, found=str(error)) from error
    except MemoryError:
        raise
    except UnidentifiedImageError:  # its text names an object in memory
        raise ImageError(
            "not a readable picture: no known format", where=where, expected=f"one of {', '.join(FORMATS)}"
        ) from None
    except Exception as error:  # whatever a header parser trips over
        raise ImageError(
            f"not a readable picture: {error}", where=where, expected=f"one of {', '.join(FORMATS)}"
        ) from error
