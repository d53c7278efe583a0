"""The contract of every way to run over ranks: what it trains, draws and exports is what one process does, and any goes on.

One launch a number of ranks, its cases in sequence. In CI two ranks, and ways in which no rank has the
model whole; nightly every family in every way, on one, two and four, on up to two each from every checkpoint.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import third_patch
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from family_engines import AT, DRAWS_NOT, LR, WAYS, family_case, family_taken_up, swapped_bits

from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.testing.spawn import run_ranks

NAMES = ("sdxl", "sd3", "flux", "sdxl-lora", "flux-lora", "flux-lora-nf4", "flux-lora-bf16")
# each way is on a family in CI in its own file: test_engine_doors.py, test_engine_fsdp.py, test_engine_pipeline.py
IN_CI = {
    "sdxl": (), "sd3": (), "flux": (), "sdxl-lora": (), "flux-lora": ("native",),
    "flux-lora-nf4": ("fsdp", "pipeline", "accelerate", "zero3"), "flux-lora-bf16": (),
}  # fmt: skip
NOT_ON = {1: ("hybrid", "pipeline"), 2: ("hybrid",)}  # it would be another way, or is none
NOT_OF = {"sdxl-lora": ("zero3",)}  # refused by name: adapters of text encoders


def ways_of(name: str, world: int, wide: bool) -> list[str]:
    ways = [way for way in WAYS if way not in (*NOT_ON.get(world, ()), *NOT_OF.get(name, ()))]
    return ways if wide else [way for way in ways if way in IN_CI[name]]


# ---------------------------------------------------------------- what the ranks run


def cases(folder: str, wide: str) -> None:
    """Run every way on these ranks, then let each take up the checkpoint of the one before; wide: of every one.

    On four ranks too of the one before: every pair would be an hour of two cores.
    """
    warnings.simplefilter("ignore")
    third_patch.apply_for("accelerate", "oss")
    out, found = Path(folder), {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        torch.set_num_threads(1)
        for what in ("adapter", "all"):
            found[f"swapped {what}"] = swapped_bits(ranks, what)
        for name in NAMES:
            ways = ways_of(name, ranks.size, bool(wide))
            for way in ways:
                found[f"{name} {way}"] = family_case(ranks, out, name, way)
            for number, way in enumerate(ways):
                for writer in ways if wide and ranks.size <= 2 else [ways[number - 1]]:
                    path = out / f"{name}-{writer}-state"
                    found[f"{name} {way} from {writer}"] = family_taken_up(ranks, path, name, way, None)[0]
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / "found.json").write_text(json.dumps(gathered))


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Alone:
    """What one process of the native engine makes of a family, trained when it is first asked for."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._made: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._made:
            self._made[name] = family_case(Ranks(), self.out, name, "native")
        return self._made[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


class Launches:
    """What numbers of ranks found, each launched when it is first asked for."""

    def __init__(self, parent: Path, wide: bool) -> None:
        self.parent, self.wide = parent, wide
        self._found: dict[int, list[dict[str, Any]]] = {}

    def __getitem__(self, world: int) -> tuple[Path, list[dict[str, Any]]]:
        folder = self.parent / str(world)
        if world not in self._found:
            folder.mkdir()
            wide = "wide" if self.wide else ""
            run_ranks(world, f"{__file__}::cases", folder, wide, timeout_s=3600 if wide else 400)
            self._found[world] = json.loads((folder / "found.json").read_text())
        return folder, self._found[world]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Launches:
    wide = any(item.get_closest_marker("nightly") for item in request.session.items)
    return Launches(tmp_path_factory.mktemp("ranks"), wide)


def off(one: Path, other: Path) -> float:
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


NIGHTLY = pytest.mark.nightly
CASES = [
    pytest.param(world, name, way, marks=() if world == 2 and way in ways_of(name, 2, False) else NIGHTLY)
    for world in (1, 2, 4)
    for name in NAMES
    for way in ways_of(name, world, True)
]


@pytest.mark.parametrize(("world", "name", "way"), CASES)
def test_it_trains_averages_evaluates_draws_and_exports_as_one_process(
    launches: Launches, alone: Alone, world: int, name: str, way: str
) -> None:
    folder, found = launches[world]
    mine, one = [each[f"{name} {way}"] for each in found], alone[name]
    for each in mine:
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert each["evaluated"] == pytest.approx(one["evaluated"], rel=1e-6)
        assert each["losses"] == mine[0]["losses"] and each["evaluated"] == mine[0]["evaluated"]
    for kind, most in (("trained", LR), ("averaged", LR), ("picture", 2.0)):
        if kind != "picture" or way not in DRAWS_NOT:
            apart = off(
                *(each / f"{name}-{how}-{kind}.safetensors" for each, how in ((folder, way), (alone.out, "native")))
            )
            assert apart <= most, kind


@pytest.mark.parametrize("what", ["adapter", "all"])
def test_ranks_whose_blocks_wait_in_host_memory_have_the_bits_of_those_without(launches: Launches, what: str) -> None:
    for each in launches[2][1]:
        found = each[f"swapped {what}"]
        assert found["losses"][0] == found["losses"][1] and found["same"]
        assert found["moved"][0] == 0 < found["moved"][1] and len(set(found["losses"][0])) == 3


@pytest.mark.parametrize(("world", "name", "way"), CASES)
def test_it_goes_on_from_its_own_checkpoint_to_the_bit_and_from_another_ways(
    launches: Launches, alone: Alone, world: int, name: str, way: str
) -> None:
    _, found = launches[world]
    for each in found:
        losses, same = each[f"{name} {way}"]["resumed"]
        assert losses == each[f"{name} {way}"]["losses"][AT:] and same
        taken = [value for key, value in each.items() if key.startswith(f"{name} {way} from ")]
        assert taken and all(more == pytest.approx(alone[name]["losses"][AT:], rel=1e-6) for more in taken)


@pytest.mark.parametrize(("world", "name", "way"), CASES)
def test_one_process_goes_on_from_its_checkpoint(
    launches: Launches, alone: Alone, world: int, name: str, way: str
) -> None:
    folder, _ = launches[world]
    losses, _ = family_taken_up(Ranks(), folder / f"{name}-{way}-state", name, "native", None)
    assert losses == pytest.approx(alone[name]["losses"][AT:], rel=1e-6)
