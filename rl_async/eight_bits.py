"""Rounding to 8 bits, as the embedded engine and our layers for vLLM do it."""

import torch
from torch import Tensor

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers [..., rows, columns] of ``dtype`` and scales float32 [..., rows, 1], whose product is near
    ``weight``.

    Rounds to the nearest number. A row of zeros has the scale 0; of one with an element that is not finite no product
    is.
    """
    whole = not dtype.is_floating_point
    most = torch.iinfo(dtype).max if whole else torch.finfo(dtype).max
    wide = weight.float()
    scales = wide.abs().amax(-1, keepdim=True) / most
    numbers = (wide / torch.where(scales > 0, scales, 1.0)).clamp_(-most, most)
    return (numbers.round_() if whole else numbers).to(dtype), scales
