"""Tracked files: public addresses are declared, no path or registry of a machine slips in, scripts can be run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATEMENT = ROOT / "public_address_statement.md"
ADDRESS = re.compile(
    r"(?:https?|git|ssh)://[^\s\"'`<>|)\]]+[^\s\"'`<>|)\].,;:]|[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b"
)
IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
LOCAL = re.compile(
    r"^(127\.|0\.0\.0\.0|10\.|192\.168\.|255\.)|://(localhost|127\.0\.0\.1|\[|\{|\$)|://([^/@]*@)?[^/.]+(/|$)"
)  # a host without a dot is none
# spelt apart, so that this file does not name what it looks for
MACHINE_PATH = re.compile("(?<![\\w.~}])/(?:" + "|".join(("work", "ro" + "ot", "ho" + "me", "t" + "mp")) + r")/\w")
REGISTRY = re.compile(r"--(?:extra-)?" + "index-url|--trusted" + "-host|--" + r"registry\b", re.IGNORECASE)
HOST_WITH_PORT = re.compile(r"(?<![\w.@/-])(?:[a-z][\w-]*\.)+[a-z][\w-]*:\d{2,5}(?!\w)")


def tracked() -> list[Path]:
    """Return the tracked files that hold text, with those about to be."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("this is no git checkout")
    files = [ROOT / name for name in done.stdout.splitlines()]
    return [path for path in files if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def lines() -> list[tuple[str, int, str]]:
    return [
        (str(path.relative_to(ROOT)), number, line)
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def addresses_in(line: str) -> set[str]:
    """Return public addresses of a line: URLs, mail addresses, IP addresses; not loopback or a variable."""
    return {found for found in ADDRESS.findall(line) + IP.findall(line) if not LOCAL.search(found)}


def declared() -> dict[tuple[str, str], int]:
    """Return (file, address) of every row of the statement."""
    rows = {}
    for number, line in enumerate(STATEMENT.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 5 and cells[0] not in ("类型", "") and not set(cells[0]) <= set("-: "):
            rows[cells[2], cells[3]] = number
    return rows


def test_public_addresses_are_declared_and_nothing_else_is() -> None:
    found = {
        (name, address)
        for name, _, line in lines()
        if name != STATEMENT.name and name != Path(__file__).relative_to(ROOT).as_posix()
        for address in addresses_in(line)
    }
    rows = set(declared())
    assert found - rows == set(), "give these a row in public_address_statement.md"
    assert rows - found == set(), "these rows stand for nothing: remove them"


def test_what_counts_as_an_address() -> None:
    assert addresses_in("see https://example.com/a/b?c=1.") == {"https://example.com/a/b?c=1"}
    assert addresses_in("[x](http://example.com/a) and 8.8.8.8, me@example.com") == {
        "http://example.com/a",
        "8.8.8.8",
        "me@example.com",
    }
    assert not addresses_in("http://127.0.0.1:80 at localhost, f'http://{host}:1', 0.0.0.0, torch 2.13.0, 127.0.0.1")
    assert not addresses_in("https://me:secret@hub/model, package@1.1.0, http://stub/x")


def test_no_machine_path_and_no_registry() -> None:
    assert MACHINE_PATH.search("see " + "/wo" + "rk/x") and not MACHINE_PATH.search("network/x and ./work/x")
    assert REGISTRY.search("pip install --" + "index-url x") and not REGISTRY.search("REGISTRY = {")
    assert HOST_WITH_PORT.search("at packages.example" + ":8080") and not HOST_WITH_PORT.search("localhost:29500")
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in lines()
        if MACHINE_PATH.search(line) or REGISTRY.search(line) or HOST_WITH_PORT.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_documents_name_flags_that_exist() -> None:
    from difftrain.cli import cache, compare, compare_trace, convert, dataset, doctor, generate, init, recipes, watch
    from difftrain.cli.documents import SCHEMA_FLAGS
    from difftrain.cli.export import TABLE
    from difftrain.config.spellings import keys, text_to_image
    from difftrain.config.spellings.flags import FLAGS
    from difftrain.config.spellings.keys import TABLES
    from difftrain.launch.flags import OWNED
    from difftrain.sampling.prompts import OPTIONS

    known = {
        *FLAGS,
        *TABLE,
        *dataset.OWN,
        *cache.FLAGS,
        *compare.FLAGS,
        *watch.FLAGS,
        *init.TABLE,
        *generate.TABLE,
        *convert.TABLE,
        *SCHEMA_FLAGS,
        *doctor.FLAGS,
        *compare_trace.FLAGS,
        *recipes.FLAGS,
        *OPTIONS,
        *keys.OPTIONS,
        *TABLES,  # --section.key of train.py
        "section",
        *(name for owned in OWNED for name in owned.names),
        "help",
        "dry_run",
        *text_to_image.FLAGS,
    }
    scripts = (ROOT / "test" / "simulated_npu" / "run", ROOT / "test" / "run_tests.sh")
    known |= {
        flag for script in scripts for flag in re.findall(r"^ +--([a-z_]+)=?\*?\)", script.read_text(), re.MULTILINE)
    }
    # flags of pip, tensorboard, pytest and of launchers that documents may show
    known |= {
        "num_gpus",
        "num_processes",
        "multi_gpu",
        "master_addr",
        "no-deps",
        "standalone",
        "max-restarts",
        "update-golden",
        "device",
        "logdir",
        "X",
        "log_first_steps",  # docs/adding/flag.md adds it to a copy
        "sheet",  # of benchmarks/edit_pairs.py
        "only",  # of test/drills/planted_faults.py
        "ntasks-per-node",  # of srun
        "rm",  # of docker
        "shm-size",
    }
    wrong = [
        f"{name}:{number}: --{flag}"
        for name, number, line in lines()
        if name.endswith(".md") and Path(name).name != "flags.md" and not name.startswith("benchmarks/")
        for flag in re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", line)
        if flag not in known or (flag in FLAGS and FLAGS[flag].status in ("later", "refused"))
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_have_no_package_files() -> None:
    simulator = ROOT / "test" / "simulated_npu" / "start"  # no tests: a package that other processes import
    assert not [path for path in (ROOT / "test").rglob("__init__.py") if not path.is_relative_to(simulator)]


def test_files_stay_short() -> None:
    most = {"test": 600}  # a table of cases is long without being hard to read
    long = [
        f"{name}: {count} lines"
        for path in tracked()
        if (name := path.relative_to(ROOT).as_posix()).endswith(".py")
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > most.get(name.split("/")[0], 450)
    ]
    assert not long, "\n".join(long)


def test_engines_stay_small() -> None:
    """All ways to train, from one device to stages over machines, in one room of so many lines."""
    files = [p for p in tracked() if p.suffix == ".py" and p.parent == ROOT / "library" / "difftrain" / "engine"]
    assert len(files) > 10
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 3500
