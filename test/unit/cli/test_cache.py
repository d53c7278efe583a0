"""difftrain cache: what it prints, its exit codes, and the faults of its command lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from refusals import is_about, names
from small_caches import add_reject, address, flip, make, want, write

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.index import Metadata, merge
from difftrain.cli import cache, cache_build, main
from difftrain.contracts.errors import ConfigFault


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["cache", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def hurt(folder: CacheFolder, number: int) -> str:
    """Flip a bit of an entry; return its segment."""
    row = Metadata(folder.database).lookup(address(number))
    assert row is not None
    flip(folder.file(row.segment, BIN), row.offset + 130)
    return row.segment


def test_damage_is_named_repaired_and_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")
    path = str(folder.path)
    code, out, err = run(capsys, "verify", path)
    assert (code, err) == (0, "") and names(out, "18") and "DAMAGED" not in out
    segment = hurt(folder, 8)
    code, out, _ = run(capsys, "verify", path)
    assert code == 1 and segment in out and "'picture 8'" in out and f"cache repair {path}" in out
    code, out, _ = run(capsys, "verify", path, "--json", "--workers", "1")
    document = json.loads(out)
    assert code == 1 and not document["whole"]
    assert [(one["segment"], one["record"], one["kind"]) for one in document["damages"]] == [
        (segment, "picture 8", "checksum")
    ]
    code, out, _ = run(capsys, "repair", path)
    assert code == 0 and names(out, "1 damaged")
    write(folder, [8])
    merge(folder)
    assert run(capsys, "verify", path)[0] == 0


def test_info_says_what_a_cache_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")
    add_reject(folder, 99)
    merge(folder)
    want(folder, "few", range(3), whole=False)
    code, out, _ = run(capsys, "info", str(folder.path), "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["entries"] == 19 and facts["rejects"] == 1 and facts["segments"]["count"] == 4
    sizes = [100 + 7 * number for number in range(18)]
    assert facts["bytes_per_sample"] == {"moments": sum(sizes) / 18}
    assert facts["bytes"] > sum(sizes)
    assert facts["fingerprints"] == {"latents": ["f"]}
    (encoder,) = facts["encoders"]
    assert (encoder["encoder"], encoder["storage"], encoder["entries"]) == ("latents", "fp32", 19)
    assert encoder["features"]["moments"]["dtypes"] == ["uint8"]
    assert {use["id"]: (use["whole"], use["wants"]) for use in facts["uses"]} == {
        "all": (True, {"latents": 18}),
        "few": (False, {"latents": 3}),
    }
    assert facts["unused"]["entries"] == 1  # the reject, which neither wants
    code, out, _ = run(capsys, "info", str(folder.path))
    assert code == 0 and names(out, "fingerprint f", f"{sum(sizes) / 18:.0f} bytes", "use all")


def test_info_of_a_cache_whose_index_is_behind_or_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")
    running = write(folder, range(30, 34), seal=False)
    _, out, _ = run(capsys, "info", str(folder.path), "--json")
    segments = json.loads(out)["segments"]
    assert (segments["unsealed"], segments["entries_not_in_database"]) == (1, 4)
    running.close()
    folder.database.unlink()
    code, out, _ = run(capsys, "info", str(folder.path))
    assert code == 0 and names(out, "4 segments", folder.database)
    empty = CacheFolder.open(tmp_path / "empty", create=True)
    code, out, _ = run(capsys, "info", str(empty.path))
    assert code == 0 and str(empty.path) in out and "fingerprint" not in out


def test_info_and_verify_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")

    def state() -> list[tuple[str, int]]:
        return [(str(path), path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*")) if path.is_file()]

    before = state()
    for command in ("info", "verify"):
        assert run(capsys, command, str(folder.path))[0] == 0
    assert run(capsys, "gc", str(folder.path), "--dry_run")[0] == 0
    assert state() == before


def test_gc_at_the_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")
    want(folder, "few", range(3))
    references.remove(folder, "all")
    code, out, _ = run(capsys, "gc", str(folder.path), "--dry_run")
    assert code == 0 and re.search(r"\bKiB ", out) and len(folder.names()) == 3
    code, out, _ = run(capsys, "gc", str(folder.path))
    assert code == 0 and "KiB freed" in out and len(folder.names()) == 1
    code, out, _ = run(capsys, "gc", str(folder.path), "--unused_days", "0")
    assert code == 0 and names(out, "use few", "0 days") and not folder.names()


@pytest.mark.parametrize("command", ["info", "verify", "repair", "gc"])
def test_what_is_no_cache_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cache.json").write_text('{"format": 7}')
    (tmp_path / "file").write_text("")
    for name, says in (("nowhere", "cache.json"), ("other", "format 7"), ("file", "cache.json")):
        code, _, err = run(capsys, command, str(tmp_path / name))
        assert code == 2 and says in err and str(tmp_path / name) in err, err
    code, _, err = run(capsys, command, "s3://bucket/cache")
    assert code == 2 and "s3://bucket/cache" in err


def test_without_a_folder_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert run(capsys, "verify")[0] == 2
    make(tmp_path / "difftrain")
    assert run(capsys, "verify")[0] == 0


def test_faults_of_command_lines_are_said_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "verify", "a", "b", "--workers=0", "--jsn")
    _, *faults = err.splitlines()
    expected = (("'b'", "verify"), ("--workers", "1", "0"), ("--jsn", "--json"))
    assert code == 2 and len(faults) == 3
    assert all(any(is_about(fault, *facts) for fault in faults) for facts in expected), err
    code, _, err = run(capsys, "gc", "--unused_days=x")
    assert code == 2 and is_about(err.splitlines()[-1], "--unused_days", "whole number", "'x'")
    code, _, err = run(capsys, "export", "a", "--format=zip")
    assert code == 2 and "--output: is missing" in err and "--format" in err
    code, _, err = run(capsys, "verfy")
    assert code == 2 and names(err, "verfy", "verify")
    assert run(capsys)[0] == 2 and run(capsys, "--help")[0] == 0


def test_export_at_the_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "c")
    for number, form in enumerate(("webdataset", "safetensors")):
        output = tmp_path / f"out{number}"
        words = (str(folder.path), f"--output={output}", f"--format={form}", "--encoders=latents", "--use=all")
        code, out, _ = run(capsys, "export", *words)
        assert code == 0 and "18 samples in 1 files" in out and (output / "export.json").exists()
    hurt(folder, 8)
    code, out, _ = run(capsys, "export", str(folder.path), f"--output={tmp_path / 'left'}", "--json")
    assert code == 1 and json.loads(out)["samples"] == 17
    code, _, err = run(capsys, "export", str(folder.path), f"--output={tmp_path / 'none'}", "--use=nobody")
    assert code == 2 and "nobody" in err and not (tmp_path / "none").exists()


def test_progress_says_how_far_how_fast_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = cache.ProgressLine(quiet=False)
    now = 20.0
    progress(2 << 30, 10 << 30)
    assert capsys.readouterr().err == "2.0 of 10.0 GiB, 102 MiB/s, 1 min 20 s left\n"
    now = 21.0
    progress(3 << 30, 10 << 30)
    assert not capsys.readouterr().err  # not so soon again


LINE = ["--train_data_dir=.", "--resolution=64,64", "--init_from_config=tiny"]


@pytest.mark.parametrize(
    ("flags", "latents", "text"),
    [
        ([], True, True),
        (["--cache_latents"], True, False),
        (["--cache_latents_to_disk"], True, False),
        (["--cache_text_encoder_outputs"], False, True),
        (["--train_text_encoder"], True, False),
        (["--cache_latents", "--cache_text_encoder_outputs_to_disk", "--cache_only"], True, True),
    ],
)
def test_build_is_a_training_command_that_only_caches(flags: list[str], latents: bool, text: bool) -> None:
    section = cache_build.read([*LINE, *flags]).config.cache
    assert section.only and (section.latents_to_disk, section.text_to_disk) == (latents, text)


def test_faults_of_build_are_those_of_a_training_without_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "build", "--train_batch_size=0", "--foo", "--resolution=64,64", "--device=abacus")
    assert code == 2 and "5 faults" in err and "--output_dir" not in err
    for flag in ("--train_batch_size", "--foo", "--train_data_dir", "--pretrained_model", "--device"):
        assert flag in err
    with pytest.raises(ConfigFault, match="random_crop"):
        cache_build.read([*LINE, "--random_crop"])
    assert run(capsys, "build", "--help")[0] == 0
