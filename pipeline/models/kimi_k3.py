"""Kimi-K3: pictures, transparent ones over a chessboard.

The one family that resizes RGBA: colours are weighted by alpha during the resize as Pillow does, then every pixel is
`alpha * value + (1 - alpha) * board` in float32, cut off to a byte.  The template writes the bare anchor; the markers
around it and the picture's own size are part of the replacement.  Reference: the checkpoint's processor, known from SMG
and the `direct` vectors of our references; it resizes with stock Pillow, up to 3 levels from ours.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from engines.base import Modality
from pipeline.models._kimi import Chessboard, KimiSettings, KimiVision
from pipeline.models._picture import token
from pipeline.models._values import section, whole
from pipeline.models.base import Anchor, BundleConfig, FamilyError, Measured, Replacement, Vocabulary
from pipeline.transforms import BICUBIC, resize

_BEGIN, _CONTENT, _END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
_DEFAULT_BOARD = {"pattern": "chessboard"}
_STAGES = ("after_resize", "before_resize")
_BLOCK_ROWS = 16


class KimiK3(KimiVision):
    name = "kimi_k3"
    model_types = frozenset({"kimi_k3"})
    name_patterns = (("kimi", "k3"),)

    patch_limit = 65_536

    def keeps_alpha(self, settings: KimiSettings) -> bool:
        return settings.board is not None

    def _board(self, values: Mapping[str, Any]) -> Chessboard | None:
        """`transparent_bg_config`; null turns the rule off, and white shows through as for other families."""
        if values.get("transparent_bg_config", _DEFAULT_BOARD) is None:
            return None
        board = section(values, "transparent_bg_config") or _DEFAULT_BOARD
        stage = values.get("transparent_bg_fill_stage") or _STAGES[0]
        if board.get("pattern") != "chessboard" or board.get("chessboard_square_on_top_left") is False:
            raise FamilyError(f"transparent_bg_config {dict(board)} is not supported: a chessboard, light first, is")
        if stage not in _STAGES:
            raise FamilyError(f"transparent_bg_fill_stage must be one of {', '.join(_STAGES)}, got {stage!r}")
        return Chessboard(
            square=whole(board, ("chessboard_square_size",), 8),
            light=_gray(board, "chessboard_white_value", 255),
            dark=_gray(board, "chessboard_gray_value", 180),
            before_resize=stage == "before_resize",
        )

    def _resized(self, settings: KimiSettings, picture: Image.Image, height: int, width: int) -> Image.Image:
        board = settings.board
        if picture.mode != "RGBA" or board is None:
            return resize(picture, height, width, BICUBIC)
        if board.before_resize:
            return resize(over_chessboard(picture, board), height, width, BICUBIC)
        return over_chessboard(resize(picture, height, width, BICUBIC), board)

    def anchor(self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality) -> Anchor:
        """Also asks for the markers, so that a vocabulary without them is refused when the model is loaded."""
        for text in (_BEGIN, _CONTENT, _END):
            token(vocabulary, text)
        return super().anchor(bundle, vocabulary, modality)

    def replacement(
        self, bundle: BundleConfig, vocabulary: Vocabulary, modality: Modality, measured: Measured
    ) -> Replacement:
        """`<|media_begin|>image WxH<|media_content|>`, the pads, `<|media_end|>`; W and H before resizing."""
        assert measured.stated_size is not None
        height, width = measured.stated_size
        head = [token(vocabulary, _BEGIN), *vocabulary.encode(f"image {width}x{height}"), token(vocabulary, _CONTENT)]
        pads = [self.feature_token(bundle, vocabulary, modality)] * measured.feature_tokens
        return Replacement([*head, *pads, token(vocabulary, _END)], features=((len(head), len(pads)),))


def over_chessboard(picture: Image.Image, board: Chessboard) -> Image.Image:
    """An RGBA picture as RGB over the board, a channel and a few rows at a time: the scratch stays in L2."""
    size = picture.height, picture.width
    bands = [np.frombuffer(picture.tobytes("raw", band), np.uint8).reshape(size) for band in "RGBA"]
    blended = [np.empty(size, np.uint8) for _ in "RGB"]
    squares = np.arange(picture.width) // board.square % 2
    backs = np.where([squares, 1 - squares], np.float32(board.dark), np.float32(board.light))
    share, rest, values = np.empty((3, _BLOCK_ROWS, picture.width), np.float32)
    for top in range(0, picture.height, _BLOCK_ROWS):
        rows = slice(top, min(top + _BLOCK_ROWS, picture.height))
        alpha, uncovered, value = share[: rows.stop - top], rest[: rows.stop - top], values[: rows.stop - top]
        alpha[...] = bands[3][rows]
        np.divide(alpha, np.float32(255), out=alpha)
        np.subtract(np.float32(1), alpha, out=uncovered)
        np.multiply(uncovered, backs[np.arange(top, rows.stop) // board.square % 2], out=uncovered)
        for band, found in zip(bands, blended, strict=False):  # the alpha band has nowhere to go
            value[...] = band[rows]
            np.multiply(value, alpha, out=value)
            np.add(value, uncovered, out=value)
            found[rows] = value  # cut off to whole levels
    return Image.merge("RGB", [Image.fromarray(found) for found in blended])


def _gray(board: Mapping[str, Any], name: str, default: int) -> int:
    value = board.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise FamilyError(f"{name} must be a byte, got {value!r}")
    return value
