"""A data set class of the user's own: what it may hand out, and what is said of one that is broken."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from index_lines import read_again
from rejects import kind

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, DataFault, DrawSpec, FeatureSpec
from difftrain.data.index.index import Index
from difftrain.data.loader import make_loader
from difftrain.data.media.media import decode
from difftrain.data.prepare import make_plan, open_data, prepare
from difftrain.testing.pictures import picture

GOOD = """
import io
from pathlib import Path
import numpy as np
from PIL import Image

class Good:
    fingerprint = "first"
    def __init__(self, folder=None):
        self.folder = folder
    def __len__(self):
        return 6
    def name(self, i):
        return f"item/{i}.png"
    def __getitem__(self, i):
        array = np.full((40 + i, 64, 3), 10 * i, dtype=np.uint8)
        if i == 0:
            return array, "an array"
        if i == 1:
            return Image.fromarray(array), ["a PIL image", "the same"]
        if i == 2:
            file = io.BytesIO()
            Image.fromarray(array).save(file, "PNG")
            return file.getvalue(), "bytes", (64, 42)
        if i == 3:
            return {"image": Path(self.folder) / "a.png", "caption": "a path"}
        if i == 4:
            return array[..., 0], "grey"
        return np.dstack([array, np.full(array.shape[:2], 0, np.uint8)]), "transparent"
"""

BROKEN = """
import numpy as np
PIXELS = np.zeros((32, 32, 3), np.uint8)
class NoLength:
    def __getitem__(self, i): ...
class Empty(list):
    pass
class Raises:
    def __init__(self): raise RuntimeError("no disk")
class BadLength:
    def __len__(self): raise OSError("gone")
    def __getitem__(self, i): ...
class Twice:
    def __len__(self): return 3
    def __getitem__(self, i): return PIXELS, "x"
    def name(self, i): return "same"
class Nameless(Twice):
    def name(self, i): return i
class Printless(Twice):
    fingerprint = 3
class Items:
    def __len__(self): return 8
    def __getitem__(self, i):
        if i == 0: raise KeyError("hole")
        if i == 1: return PIXELS
        if i == 2: return PIXELS.astype(float), "x"
        if i == 3: return PIXELS, 5
        if i == 4: return PIXELS, None
        if i == 5: return "gone.png", "x"
        return PIXELS, "good"
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules, from which the run is started."""
    (tmp_path / "mine_good.py").write_text(GOOD)
    (tmp_path / "mine_broken.py").write_text(BROKEN)
    (tmp_path / "mine_torn.py").write_text("import nothing_of_this_name")
    (tmp_path / "a.png").write_bytes(picture(1, (50, 60)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("mine_good", "mine_broken", "mine_torn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def config(folder: Path, dotted: str, *dirs: str, **data: Any) -> TrainConfig:
    values = {"dataset_class": dotted, "dirs": dirs, "resolution": (64, 64), "cache_dir": str(folder / "cache")}
    return TrainConfig.model_validate({"data": values | {"workers": 0} | data, "training": {"seed": 1}})


def index_of(cfg: TrainConfig, said: list[str] | None = None) -> Index:
    return open_data(cfg, prepare(cfg, log=(said if said is not None else []).append)).index


@pytest.mark.flags("dataset_class")
@pytest.mark.parametrize("verify", ["full", "quick"])
def test_all_that_a_class_may_hand_out(modules: Path, verify: str) -> None:
    index = index_of(config(modules, "mine_good.Good", str(modules), verify=verify))
    records = {record.media.path: record for record in index.records(range(index.count))}
    assert index.summary.rejected == 0 and index.summary.verify == verify
    assert {name: record.captions for name, record in records.items()} == {
        "item/0.png": ("an array",), "item/1.png": ("a PIL image", "the same"), "item/2.png": ("bytes",),
        "item/3.png": ("a path",), "item/4.png": ("grey",), "item/5.png": ("transparent",),
    }  # fmt: skip
    assert [record.size_hw for _, record in sorted(records.items())] == [
        (40, 64), (41, 64), (42, 64), (60, 50), (44, 64), (45, 64),
    ]  # fmt: skip
    for number in (0, 1, 2, 4):
        pixels = decode(index.read(records[f"item/{number}.png"].media))
        assert np.array_equal(pixels, np.full((40 + number, 64, 3), 10 * number, np.uint8)), number
    assert np.all(decode(index.read(records["item/5.png"].media)) == 255), "transparent is laid over white"
    assert records["item/0.png"].name == "mine_good.Good/item/0.png"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_trains_in_any_process(modules: Path, workers: int) -> None:
    cfg = config(modules, "mine_good.Good", str(modules), workers=workers)
    data = open_data(cfg, prepare(cfg, log=lambda line: None))
    steps = make_loader(
        data, make_plan(data, cfg, 1), FeatureSpec({}, {"u": DrawSpec("uniform")}), lambda captions: {}, cfg,
        dp_rank=0, dp_size=1, first_step=0, last_step=6,
    )  # fmt: skip
    batches = [batch for micro in steps for batch in micro]
    assert len({batch.keys for batch in batches}) == 6 and not any(batch.rejects for batch in batches)


def test_only_a_fingerprint_saves_another_look(modules: Path) -> None:
    cfg = config(modules, "mine_good.Good", str(modules))
    index_of(cfg)
    said: list[str] = []
    index_of(cfg, said)
    assert read_again("\n".join(said)) == 0
    text = (modules / "mine_good.py").read_text()
    for module, change in (("mine_second", 'fingerprint = "second"'), ("mine_none", "pass")):
        (modules / f"{module}.py").write_text(text.replace('fingerprint = "first"', change))
    twice = config(modules, "mine_none.Good", str(modules))
    first, said = index_of(twice), []
    assert index_of(twice, said).folder == first.folder, "other runs may read it"
    assert read_again("\n".join(said)) == 6
    text = (
        (modules / "mine_none.py").read_text().replace("10 * i", "110 * i")
    )  # of another length: bytecode is known by that and the second
    (modules / "mine_none.py").write_text(text)
    del sys.modules["mine_none"]
    assert index_of(twice).folder != first.folder, "of the same sizes and captions, but other pictures"


@pytest.mark.flags("dataset_class")
@pytest.mark.parametrize(
    ("dotted", "what"),
    [
        ("mine_gone.A", "imported: ModuleNotFoundError"),
        ("mine_torn.A", "imported: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("mine_good.Bad", "mine_good has no Bad (it has Good)"),
        ("mine_broken.NoLength", "has no __len__"),
        ("mine_broken.Raises", "mine_broken.Raises() fails: RuntimeError: no disk"),
        ("mine_broken.BadLength", "len(mine_broken.BadLength) fails: OSError: gone"),
        ("mine_broken.Twice", "calls items 0 and 1 both 'same'"),
        ("mine_broken.Nameless", "name(0) is 0, "),
        ("mine_broken.Printless", "fingerprint is 3, "),
    ],
)
def test_broken_classes(modules: Path, dotted: str, what: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        prepare(config(modules, dotted), log=lambda line: None)
    assert what in str(caught.value) and "--dataset_class" in str(caught.value)


def test_an_empty_class(modules: Path) -> None:
    with pytest.raises(DataFault, match=r"mine_broken\.Empty: no samples"):
        prepare(config(modules, "mine_broken.Empty"), log=lambda line: None)


def test_broken_items_are_named_and_left_out(modules: Path) -> None:
    index = index_of(config(modules, "mine_broken.Items", max_rejected_share=0.8))
    said = {Path(reject.path).name: reject.reason for reject in index.rejects()}
    assert index.count == 2 and len(said) == 6
    assert said["0"] == "broken item: KeyError: 'hole'"
    assert re.match(r"broken item: TypeError: .* \(image, caption\), .*ndarray", said["1"])
    assert re.match(r"broken item: TypeError: .*float64 .*\(32, 32, 3\) .*8-bit", said["2"])
    assert kind(said["3"]) == "caption text" and said["3"].endswith(" int")
    assert kind(said["4"]) == "no caption"
    assert os.strerror(errno.ENOENT) in said["5"]
