"""Every flag of the cache does what it says, at the door of training: what lies in the cache, and what is read of it."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from doors import losses, write_pictures

from difftrain.cache import encoding
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.index import Metadata
from difftrain.cache.tools.repair import repair
from difftrain.config.parse_flags import parse
from difftrain.contracts import TrainingFault
from difftrain.train.outputs import log
from difftrain.train.run import run

ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
BUILD = (*ON_DISK, "--cache_only")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pictures(tmp_path_factory.mktemp("pictures") / "data", 8)
    for number in range(8):
        (folder / f"{number:03d}.txt").write_text(f"picture {number}, soft, red, small, round, new")
    return folder


class Place:
    """A cache, and runs that use it."""

    def __init__(self, root: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.data, self.cache, self.capsys = root, data, root / "cache", capsys
        self._runs = 0

    def run(self, *flags: str) -> list[str]:
        """Run the door in this process; return what it said."""
        self._runs += 1
        argv = [
            "--init_from_config=tiny", f"--train_data_dir={self.data}", f"--output_dir={self.root / f'o{self._runs}'}",
            "--resolution=64,64", "--train_batch_size=2", "--max_train_steps=2", "--seed=1", "--device=cpu",
            f"--cache_dir={self.cache}", "--max_data_loader_n_workers=0", "--log_every=1", *flags,
        ]  # fmt: skip
        assert run(parse(argv).config, argv) == 0
        return self.capsys.readouterr().out.splitlines()

    @property
    def folder(self) -> CacheFolder:
        return CacheFolder.open(self.cache)

    def stored(self) -> dict[str, dict[str, str]]:
        """Return encoder -> feature -> dtype."""
        return {each.header["encoder"]: each.header["features"] for each in Metadata(self.folder.database).segments()}

    def entries(self) -> Counter[str]:
        """Return encoder -> entries."""
        found: Counter[str] = Counter()
        for each in Metadata(self.folder.database).segments():
            found[each.header["encoder"]] += each.entries
        return found


@pytest.fixture
def place(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, data, capsys)


def losses_of(place: Place, number: int) -> list[float]:
    return losses(place.root / f"o{number}")


@pytest.mark.flags("cache_latents_as", "cache_latents_dtype", "cache_text_dtype", "cache_dtypes")
def test_what_is_kept_and_in_which_dtype(place: Place) -> None:
    place.run(*BUILD)
    assert place.stored() == {
        "latents": {"moments": "float32"},
        "text_encoder_1": {"hidden_1": "float32"},
        "text_encoder_2": {"hidden_2": "float32", "pooled": "float32"},
    }
    small = (
        "--cache_latents_as=mean",
        "--cache_latents_dtype=bf16",
        "--cache_text_dtype=fp8",
        "--cache_dtypes=pooled=fp16",
    )
    shutil.rmtree(place.cache / "segments")
    place.run(*BUILD, *small)
    assert place.stored() == {
        "latents": {"latents": "bfloat16"},
        "text_encoder_1": {"hidden_1": "float8_e4m3fn"},
        "text_encoder_2": {"hidden_2": "float8_e4m3fn", "pooled": "float16"},
    }


@pytest.mark.flags("cache_shuffle_num")
def test_as_many_captions_of_a_record_as_were_asked_for(place: Place) -> None:
    place.run(*BUILD, "--shuffle_caption", "--cache_shuffle_num=3")
    assert place.entries()["text_encoder_1"] == 8 * 3 + 1  # and the empty one
    said = place.run(*BUILD, "--shuffle_caption")
    assert 8 * 9 < place.entries()["text_encoder_1"] <= 8 * 10 + 1, said


@pytest.mark.flags("cache_segment_gib")
def test_segments_of_a_size(place: Place) -> None:
    place.run(*BUILD)
    few = len(place.folder.names())
    shutil.rmtree(place.cache)
    place.run(*BUILD, "--cache_segment_gib=0.00001")
    sizes = [path.stat().st_size for path in place.folder.segments.glob("*.bin")]
    assert len(sizes) > few == 3 and max(sizes) < 200_000


@pytest.mark.flags("cache_batch_size", "cache_workers")
def test_captions_at_once_and_processes_that_decode(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[int, int]] = {}
    encode = encoding.encode

    def watched(job, *rest, workers, **more):
        sizes = [len(job.manifest.rows(number)) for number in range(job.manifest.batches)]
        seen[job.request.name] = (max(sizes), workers)
        encode(job, *rest, workers=workers, **more)

    monkeypatch.setattr(encoding, "encode", watched)
    place.run(*BUILD, "--cache_batch_size=3", "--cache_workers=1", "--vae_batch_size=4")
    assert seen == {"latents": (4, 1), "text_encoder_1": (3, 1), "text_encoder_2": (3, 1)}


@pytest.mark.flags("regenerate_cache")
def test_everything_is_encoded_anew(place: Place) -> None:
    place.run(*BUILD)
    before = set(place.folder.names())
    assert not any(" encoded" in line for line in place.run(*BUILD))
    said = place.run(*BUILD, "--regenerate_cache")
    assert any("--regenerate_cache: 26 entries" in line for line in said)
    rows = Metadata(place.folder.database)
    assert rows.count == 26 and {each.name for each in rows.segments() if each.entries} > set()
    assert set(place.folder.names()) > before


@pytest.mark.flags("trust_cache")
def test_nothing_of_the_data_is_looked_at(place: Place, tmp_path: Path) -> None:
    place.data = Path(shutil.copytree(place.data, tmp_path / "mine"))
    place.run(*ON_DISK)
    for path in place.data.iterdir():
        path.unlink()
    place.run(*ON_DISK, "--trust_cache")
    assert losses_of(place, 1) == losses_of(place, 2)


@pytest.mark.flags("skip_cache_check")
def test_a_flipped_bit_is_found_where_checksums_are_compared(place: Place) -> None:
    place.run(*BUILD)
    for path in place.folder.segments.glob("*.bin"):
        held = bytearray(path.read_bytes())
        for at in range(len(held) - 64, len(held) // 2, -256):
            held[at] ^= 1  # of the mantissa of some number
        path.write_bytes(held)
    place.run(*ON_DISK, "--skip_cache_check")
    with pytest.raises(TrainingFault, match="cache repair"):
        place.run(*ON_DISK)


@pytest.mark.flags("cache_preload")
def test_what_is_read_lies_in_memory(place: Place) -> None:
    place.run(*ON_DISK)
    said = place.run(*ON_DISK, "--cache_preload")
    assert losses_of(place, 1) == losses_of(place, 2)
    assert any("--cache_preload: 26 entries " in line for line in said)


def test_a_truncated_segment_is_repaired_and_built_upon(place: Place) -> None:
    place.run(*BUILD)
    largest = max(place.folder.segments.glob("*.bin"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size - 5000)
    with pytest.raises(TrainingFault, match=rf"1 entries .*damaged: .*{largest.name}.*cache repair"):
        place.run(*ON_DISK)
    list(repair(place.folder))
    said = place.run(*BUILD)
    assert sum(", 1 to be " in line for line in said) == 1
