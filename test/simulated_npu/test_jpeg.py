"""JPEG on the device: our half of it, with a stand-in for torchvision_npu, whose own half only hardware has."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = """
import enum, io, os
import numpy as np, torch
from PIL import Image

class ImageReadMode(enum.Enum):
    GRAY = "L"
    RGB = "RGB"

_library = torch.library.Library("torchvision", "DEF")
_library.define("_dvpp_init() -> int")
_library.impl("_dvpp_init", lambda: 0, "CompositeExplicitAutograd")

def decode_jpeg(input, mode=None, device="cpu"):
    assert input.device.type == "cpu" and input.dtype == torch.uint8
    picture = np.array(Image.open(io.BytesIO(input.numpy().tobytes())).convert(mode.value))
    off = np.minimum(picture, 255 - int(os.environ["OFF"])) + np.uint8(os.environ["OFF"])
    return torch.from_numpy(off.reshape(*off.shape[:2], -1)).permute(2, 0, 1).contiguous().to(device)
"""
PROBE = """
import io, sys
import numpy as np
from PIL import Image
from torch.utils.data import Dataset

def picture():
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "JPEG")
    return file.getvalue()

class Pictures(Dataset):
    def __getitem__(self, n):
        from difftrain.data.media.media import decode_for
        import torch
        found = decode_for(picture(), (256, 256), decoder="device").pixels
        return torch.from_numpy(found.copy()), "torch_npu" in sys.modules and torch.npu.current_device()

if __name__ == "__main__":
    from difftrain.data.loader import data_loader, items_of
    from difftrain.data.media.media import decode_for
    from difftrain.device import choose, jpeg
    why = jpeg.why_not(choose("npu", local_rank=1, local_size=2))
    print("why:", why)
    if not why:
        host = decode_for(picture(), (256, 256)).pixels
        ((found, device),) = items_of(data_loader(Pictures(), range(1), 1, forks=False))
        print("worker:", device, np.abs(found.numpy().astype(int) - host).max())
"""


def probed(tmp_path: Path, off: int) -> str:
    files = {
        "torchvision/__init__.py": "from torchvision import io",
        "torchvision/io/__init__.py": "from torchvision.io import image\nfrom torchvision.io.image import decode_jpeg",
        "torchvision/io/image.py": TORCHVISION,
        "torchvision_npu/__init__.py": "",
        "torchvision_npu/io/_image.py": "",
        "probe.py": PROBE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "library"), os.environ["PYTHONPATH"]])
    environ = os.environ | {"PYTHONPATH": path, "OFF": str(off), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = warm.completed([sys.executable, str(tmp_path / "probe.py")], env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.flags("image_decoder")
def test_spawned_workers_decode_on_the_device_of_their_rank(tmp_path: Path) -> None:
    assert probed(tmp_path, 1).splitlines() == ["why: ", "worker: 1 1"]


def test_a_decoder_that_is_too_far_off_is_refused(tmp_path: Path) -> None:
    said = probed(tmp_path, 3)
    assert re.search(r"why: torchvision_npu .* 3/255 .*host.* 2/255 ", said)
