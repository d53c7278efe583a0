"""Make what the simulated NPU needs, once for each version of anything in it: the wheel, a fake CANN, the kernels.

    python test/simulated_npu/build.py      prints the folder; done already, it takes no time

Standard library only. Everything goes into the user's cache folder; a build that is killed leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

WHEEL = "torch_npu==2.13.0"
TORCH = "2.13.0"
NATIVE = Path(__file__).resolve().parent / "start" / "simulator" / "native"
CANNS = ("8.5.0", "7.0.0")
EMPTY = ("ge_runner", "graph", "acl_tdt_channel", "mspti")  # torch_npu's libraries name them and need nothing of them


class Failed(Exception):
    """Say what could not be made."""


def main() -> str:
    """Return the folder of a whole build, which is made first where it is missing."""
    torch = torch_folder()
    folder = cache_folder() / f"simulated-npu-{key()}"
    if not (folder / "ready").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder.with_suffix(".lock")):
            if not (folder / "ready").exists():
                began = time.monotonic()
                print(f"building the simulated NPU in {folder}", file=sys.stderr, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                make(folder, torch)
                (folder / "ready").touch()
                print(f"built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return str(folder)


def cache_folder() -> Path:
    """Return the project's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain"


def torch_folder() -> Path:
    """Return where torch is. Raises Failed where it is not, or is another version."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Failed(f"{sys.executable} has no torch; the simulated NPU needs torch {TORCH}")
    found = metadata.version("torch").split("+")[0]
    if found != TORCH:
        raise Failed(f"{sys.executable} has torch {found}; {WHEEL} needs torch {TORCH}")
    return Path(spec.origin).parent


def key() -> str:
    """Return a word that changes with anything that the build depends on."""
    parts = [WHEEL, metadata.version("torch"), sys.version, sysconfig.get_config_var("SOABI") or ""]
    parts += [path.name + path.read_text(encoding="utf-8") for path in sorted(NATIVE.iterdir())]
    parts.append(Path(__file__).read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait for another build of the same thing."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(folder: Path, torch: Path) -> None:
    """Fetch the wheel while the fake CANN is compiled, then compile the kernels, two at a time."""
    lib, site = folder / "lib", folder / "site"
    lib.mkdir(parents=True)
    with ThreadPoolExecutor(3) as pool:
        wheel = pool.submit(fetch_wheel, site)
        hccl = pool.submit(compile_hccl, lib, torch)
        for cann in CANNS:
            fake_cann(folder, cann)
        wheel.result()
        compile_cann(lib, site / "torch_npu" / "include" / "third_party" / "acl" / "inc")
        compile_kernels(lib, torch)
        hccl.result()


def fetch_wheel(site: Path) -> None:
    """Unpack the published wheel, and nothing that it depends on, into a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    run([*command, "--target", str(site), WHEEL])


def compile_cann(lib: Path, headers: Path) -> None:
    """Compile the libraries that torch_npu's own are linked against."""
    cpp = ["c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{headers}"]
    sources = [str(NATIVE / "ascendcl.cpp"), "-x", "c", str(NATIVE / "absent.c")]
    run([*cpp, *_named(lib, "ascendcl"), *sources])
    c = ["cc", "-O1", "-fPIC", "-shared", "-w", "-x", "c"]
    # torch_npu looks runtime functions up in the compiler's library too
    beside = ["-Wl,--no-as-needed", f"-L{lib}", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
    run([*c, str(NATIVE / "op_compiler.c"), *_named(lib, "acl_op_compiler"), *beside])
    run([*c, str(NATIVE / "hccl.c"), *_named(lib, "hccl")])
    for name in EMPTY:
        run([*c, os.devnull, *_named(lib, name)])


def compile_kernels(lib: Path, torch: Path) -> None:
    """Compile the kernel that computes every aten operator."""
    run([*_torch_cpp(torch), *_named(lib, "simulated_npu"), str(NATIVE / "kernels.cpp"), *_torch_libraries(torch),
         f"-L{lib}", "-lascendcl", "-Wl,-rpath,$ORIGIN"])  # fmt: skip


def compile_hccl(lib: Path, torch: Path) -> None:
    """Compile the process group backend, a Python module."""
    python = [f"-I{sysconfig.get_path('include')}", "-DTORCH_EXTENSION_NAME=simulated_hccl"]
    run([*_torch_cpp(torch), *python, "-o", str(lib / "simulated_hccl.so"), str(NATIVE / "hccl.cpp"),
         *_torch_libraries(torch), "-ltorch_python"])  # fmt: skip


def _named(lib: Path, name: str) -> list[str]:
    return [f"-Wl,-soname,lib{name}.so", "-o", str(lib / f"lib{name}.so")]


def _torch_cpp(torch: Path) -> list[str]:
    include = torch / "include"
    return ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}",
            f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]  # fmt: skip


def _torch_libraries(torch: Path) -> list[str]:
    return [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]


def fake_cann(folder: Path, version: str) -> None:
    """Lay out the folders and files of a CANN that torch_npu, DeepSpeed and our launchers look for."""
    home = folder / f"cann-{version}" / "ascend-toolkit" / "latest"
    for name in ("runtime", "compiler", "opp", "x86_64-linux"):
        (home / name).mkdir(parents=True)
    info = f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=simulated\n"
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text(info)
    (home / "version.cfg").write_text(f"[toolkit_running_version=[{version}:{version}]]\n")
    lines = (
        'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        'export ASCEND_TOOLKIT_HOME="$here/latest" ASCEND_HOME_PATH="$here/latest" ASCEND_OPP_PATH="$here/latest/opp"',
    )
    (home.parent / "set_env.sh").write_text("\n".join(lines) + "\n")


def run(command: list[str]) -> None:
    """Run a command; its output is shown only where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}\nfailed with code {done.returncode}:\n{done.stdout[-4000:]}")


if __name__ == "__main__":
    try:
        print(main())
    except Failed as error:
        print(f"no simulated NPU: {error}", file=sys.stderr)
        sys.exit(2)
