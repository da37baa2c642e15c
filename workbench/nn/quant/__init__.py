"""Quantised storage of weight matrices, by name."""

from workbench.nn.quant.fp8 import FP8
from workbench.nn.quant.fp8_tiles import FP8Tiles
from workbench.nn.quant.int4 import INT4
from workbench.nn.quant.int4_packed import AWQ, GPTQ, PackedInt4
from workbench.nn.quant.int8 import INT8
from workbench.nn.quant.mxfp4 import MXFP4
from workbench.nn.quant.nvfp4 import NVFP4
from workbench.nn.quant.scheme import Decoder, Scheme

__all__ = [
    "AWQ",
    "FP8",
    "GPTQ",
    "INT4",
    "INT8",
    "MXFP4",
    "NVFP4",
    "SCHEMES",
    "Decoder",
    "FP8Tiles",
    "PackedInt4",
    "Scheme",
]

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (MXFP4(), FP8(), INT8(), INT4())}
