"""JPEG decoded on the NPU by torchvision_npu: where it was asked for, and nowhere else is it imported.

A process that decodes opens the device of its rank, so loader workers that do must be spawned: what was forked from a
process with a device cannot use it.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from difftrain.device import ascend
from difftrain.device.choice import ascend_index, load_npu

if TYPE_CHECKING:
    import numpy as np

    from difftrain.device.torch_device import Device

TOLERANCE = 2  # of 255, from the host's decoder: other roundings of the same transform
_SIZE = 64


def why_not(device: Device) -> str:
    """Say why pictures cannot be decoded on a device, after trying it; empty where they can."""
    if device.kind != "npu":
        return f"torchvision_npu decodes on an NPU, and this run is on {device.kind}"
    if not ascend.found_torchvision_npu():
        return "torchvision_npu, in a version that decodes from memory, is not installed with torchvision"
    try:
        off = difference()
    except Exception as error:  # of torchvision, its adapter, or the image processor's driver
        return f"torchvision_npu does not decode here: {type(error).__name__}: {error}"
    if off > TOLERANCE:
        return f"torchvision_npu decodes an image {off}/255 off the host's decoder, at most {TOLERANCE}/255 is allowed"
    return ""


def difference() -> int:
    """Return the largest difference from the host's decoder, of a smooth picture in colour."""
    import numpy as np
    from PIL import Image

    ramp = np.linspace(0, 255, _SIZE)
    across, down = np.meshgrid(ramp, ramp)
    picture = np.stack([across, down, 255 - (across + down) / 2], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=95, subsampling=0)
    host = np.asarray(Image.open(io.BytesIO(file.getvalue()), formats=("JPEG",))).astype(int)
    return int(np.abs(decode(file.getvalue(), False) - host).max())


def decode(data: bytes, grey: bool) -> np.ndarray:
    """Decode on this process's device and bring the picture back. Shape: (H, W, 3), or (H, W, 1) where grey; uint8."""
    import numpy as np
    import torch

    decoder, modes, device = _opened()
    coded = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    picture = decoder(coded, mode=modes.GRAY if grey else modes.RGB, device=device)
    return picture.permute(1, 2, 0).contiguous().cpu().numpy()


@functools.cache
def _opened() -> tuple[Callable[..., Any], Any, str]:
    """Load the packages and take the device of this rank, as training has."""
    local_rank, local_size = (int(os.environ.get(name) or default) for name, default in _LOCAL_RANK)
    index = ascend_index() if local_size == 1 and local_rank == 0 else local_rank
    load_npu().set_device(index)
    import torch
    import torchvision
    import torchvision_npu  # noqa: F401  it patches torchvision

    torch.ops.torchvision._dvpp_init()
    return torchvision.io.decode_jpeg, torchvision.io.image.ImageReadMode, f"npu:{index}"


_LOCAL_RANK = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
