"""See to the packages before anything imports them, and print the interpreter to go on with.

Standard library only: this runs on a bare Python 3.11. Messages go to standard error; standard output carries nothing
but the path of the interpreter.

The interpreter at hand is used as it is where it has everything. Else a `.venv` beside the README is made on top of
it, so that packages that are there (a torch built for an NPU above all) stay in use, and only what is missing is
added. Nothing outside `.venv` is ever changed. What is there counts where pyproject.toml allows its version;
requirements.txt says which versions are tested, and are installed. Machines that share a checkout take turns; a `.venv`
whose making was killed half-way is made again, one that a user made is never removed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "library"))  # this file runs as a script, before any package is there

from difftrain.launch.claim import end_with_parent, turn  # noqa: E402

TORCH_NEEDED = (2, 7)
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([<>=!~][^;#]*)?")
_ABOVE = "DIFFTRAIN_VENV_STAGE"  # "look" or "install": set while the packages of .venv are seen to from within it
SIGN_S = 10.0  # between signs that an installation still runs
_LACKING = 3  # the exit code of a look that found something missing


class EnvironmentUnusable(Exception):
    """Say why training cannot start here, in the user's words."""


class Failed(EnvironmentUnusable):
    """Say that a step ended by itself with an error, which it has told: nothing is left half-made."""


@dataclass(frozen=True)
class Requirement:
    """One line of requirements.txt: the whole line, its distribution, the versions tested, and those that will do."""

    line: str
    name: str
    tested: str
    allowed: str = ""


def log(text: str) -> None:
    """Print a message for the user."""
    print(text, file=sys.stderr, flush=True)


def requirements(root: Path) -> list[Requirement]:
    """Read requirements.txt, one distribution a line, and what pyproject.toml allows of each."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    allowed = {name.lower(): versions for name, versions in map(_split, project["project"]["dependencies"])}
    requirements = []
    for line in (root / "requirements.txt").read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text and not text.startswith("-"):
            name, versions = _split(text)
            requirements.append(Requirement(text, name, versions, allowed.get(name.lower(), versions)))
    return requirements


def _split(text: str) -> tuple[str, str]:
    match = _REQUIREMENT.match(text)
    return (match[1], (match[2] or "").strip()) if match else (text, "")


def numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: "2.7.1+cpu" -> (2, 7, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def installed(name: str) -> str | None:
    """Return the version of a distribution that this interpreter finds, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfied(version: str, versions: str) -> bool:
    """Say whether a version is among ">=1.26,<3", "==2.13.0" or "~=2.4" (2.4 or later, below 3)."""
    return all(_meets(numbers(version), clause.strip()) for clause in versions.split(",") if clause.strip())


def _meets(have: tuple[int, ...], clause: str) -> bool:
    match = re.match(r"(>=|==|~=|<=|<|>|!=)\s*([0-9.]+)", clause)
    if match is None:
        return True
    want = numbers(match[2])
    if match[1] == "~=" and have[: len(want) - 1] != want[:-1]:
        return False
    length = max(len(have), len(want))
    have, want = (side + (0,) * (length - len(side)) for side in (have, want))
    return {
        ">=": have >= want, "~=": have >= want, "==": have == want, "!=": have != want,
        "<": have < want, "<=": have <= want, ">": have > want,
    }[match[1]]  # fmt: skip


def missing(needed: list[Requirement]) -> list[Requirement]:
    """Return what this interpreter lacks. A torch that is there is never in the list.

    Raises: EnvironmentUnusable where torch is older than what the package runs on.
    """
    lacking = []
    for requirement in needed:
        version = installed(requirement.name)
        if requirement.name == "torch" and version is not None:
            if numbers(version)[:2] < TORCH_NEEDED:
                raise EnvironmentUnusable(
                    f"needs Python 3.11 / torch {_dotted(TORCH_NEEDED)}, found torch {version} in {sys.prefix}; "
                    "it is not changed: install a newer one, or give another Python as PYTHON=…"
                )
        elif version is None or not satisfied(version, requirement.allowed):
            lacking.append(requirement)
    return lacking


def for_npu(needed: list[Requirement], *, present: bool) -> list[Requirement]:
    """Return torch_npu in the version of the torch that is there or will be, on a machine with NPU device files."""
    if not present:
        return []
    pin = next((r.tested.removeprefix("==") for r in needed if r.name == "torch"), "")
    version = _dotted(numbers(installed("torch") or pin))
    return [Requirement(f"torch_npu=={version}", "torch_npu", f"=={version}", f"=={version}")]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def name_untested(needed: list[Requirement]) -> None:
    """Name packages that are there, and stay, in a version that nobody has tested this with."""
    untested = []
    for requirement in needed:
        version = installed(requirement.name)
        if version is not None and not satisfied(version, requirement.tested):
            untested.append(f"{requirement.name} {version} (tested {requirement.tested})")
    if untested:
        log(f"installed and kept, in an untested version: {', '.join(untested)}")


def make_venv(folder: Path) -> Path:
    """Make the .venv on top of this interpreter's packages, and return its Python."""
    log(f"making {folder} on top of {sys.executable}")
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--system-site-packages", str(folder)],
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise Failed(
            f"{sys.executable} -m venv failed: {(done.stdout + done.stderr).strip()[-600:]}\n"
            "(on Debian and Ubuntu the package python3-venv is needed)"
        )
    if sys.prefix != sys.base_prefix:  # an environment itself: "system" would mean the Python below it
        for site in folder.glob("lib/python*/site-packages"):
            places = [path for path in sys.path if path.endswith("site-packages")]
            (site / "difftrain_below.pth").write_text("".join(f"{path}\n" for path in places))
    return folder / "bin" / "python"


def install(lacking: list[Requirement]) -> None:
    """Install what is missing with pip, whose output is shown only where it fails."""
    log(f"installing {', '.join(r.line for r in lacking)}")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *(r.line for r in lacking)]
    torch = installed("torch")
    environ = dict(os.environ)
    if torch is not None:  # no dependency of theirs may bring another one
        kept = Path(sys.prefix) / "difftrain-constraints.txt"
        kept.write_text(f"torch=={torch}\n")
        command += ["--constraint", str(kept)]
    code, output = _with_signs(command, environ, "installing")
    if code:
        log(output)
        raise EnvironmentUnusable(f"pip could not install what is missing (exit code {code}); its output is above")


def _with_signs(command: list[str], environ: dict[str, str], what: str) -> tuple[int, str]:
    """Run a command whose output is kept; say at intervals that it still runs. Returns its exit code and its output."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, preexec_fn=end_with_parent
    )
    while True:
        try:
            output, _ = process.communicate(timeout=SIGN_S)
        except subprocess.TimeoutExpired:
            log(f"{what}, {time.monotonic() - began:.0f} s so far")
            continue
        return process.returncode, output


def main() -> str:
    """Return the interpreter that has every package."""
    # what this machine needs, and what the interpreter lacks of it
    needed = requirements(ROOT)
    needed += for_npu(needed, present=any(Path("/dev").glob("davinci[0-9]*")))
    venv = ROOT / ".venv"
    python = venv / "bin" / "python"
    stage = os.environ.get(_ABOVE)
    lacking = missing(needed)

    # within .venv: do what the process above asked for
    if lacking and stage == "look":
        sys.exit(_LACKING)
    if lacking and stage == "install":
        install(lacking)

    # nothing is lacking any more: this interpreter will do
    if stage or not lacking:
        name_untested(needed)
        return sys.executable

    # where a .venv of an earlier start has everything, there is no turn to wait for
    unfinished = ROOT / ".venv-unfinished"
    if python.exists() and not unfinished.exists():
        report = _again(python, "look")
        if report:
            return report

    # make or complete .venv, one process at a time; our own that was left half made is made afresh
    try:
        with turn(unfinished, log, fails_whole=Failed) as claim:
            ours = unfinished / "made-here"  # a .venv that was there before, somebody may have made by hand
            if claim.left_behind and ours.exists() and Path(sys.prefix) != venv:
                shutil.rmtree(venv, ignore_errors=True)
            if not python.exists():
                ours.touch()
                python = make_venv(venv)
            return _again(python, "install")
    except OSError as error:
        raise EnvironmentUnusable(f"{venv} cannot be made: {error}") from error


def _again(python: Path, stage: str) -> str:
    """See to the packages from within .venv; return its Python, or nothing where a look found something missing."""
    command = [str(python), str(Path(__file__).resolve())]
    environ = {**os.environ, _ABOVE: stage}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
    if done.returncode == _LACKING and stage == "look":
        return ""
    if done.returncode == 2:
        raise Failed("")
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        print(main())
    except EnvironmentUnusable as error:
        if str(error):  # else the process within .venv has said it
            log(str(error))
        sys.exit(2)
