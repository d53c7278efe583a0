"""Files of examples/: they parse, the flags and paths that they name exist, and their variables make up a job."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from difftrain.cli import COMMANDS
from difftrain.cli.launch import LAYOUTS, RECIPES
from difftrain.config.spellings.flags import FLAGS
from difftrain.device import versions
from difftrain.launch import flags, schedulers

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
ALL = sorted(path for path in EXAMPLES.rglob("*") if path.is_file())
MANIFESTS = [path for path in ALL if path.suffix == ".yaml"]
DOCKERFILES = [path for path in ALL if path.name.startswith("Dockerfile.")]
PLAIN_IMAGE = re.compile(r"[a-z0-9_-]+(/[a-z0-9_-]+)?:[\w.-]+")  # no registry's host before it
# what an installation from the checkout reads
NEEDED = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "configs", "third_patch", "library"}


def name(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


def test_every_kind_of_example_is_here() -> None:
    assert {name(path) for path in ALL} == {
        "slurm/sdxl.sbatch",
        "kubernetes/pytorchjob.yaml",
        "kubernetes/jobset.yaml",
        "volcano/job.yaml",
        "docker/Dockerfile.cpu",
        "docker/Dockerfile.cuda",
        "docker/Dockerfile.cann",
    }


def launch_lines(path: Path) -> list[list[str]]:
    """Return the words behind `launch` of every command of a file, in comments too."""
    if path in MANIFESTS:
        return [container["args"][1:] for container in containers(load(path))]
    text = re.sub(r"\\\n#? *", " ", path.read_text(encoding="utf-8"))
    found = re.findall(r"(?:difftrain(?::\w+)?) launch ((?:nm|np|1p) .*)", text)
    return [shlex.split(re.sub(r"\$\{(\w+):[?-][^}]*\}", r"\1", line).replace('"$@"', "")) for line in found]


@pytest.mark.parametrize("path", ALL, ids=name)
def test_commands_name_layouts_recipes_and_flags_that_exist(path: Path) -> None:
    lines = launch_lines(path)
    assert lines
    for layout, recipe, *words in lines:
        assert layout in LAYOUTS and recipe in RECIPES
        given = flags.read(words, {})
        assert not given.faults
        assert all(FLAGS[flag].status not in ("later", "refused") for flag in given.names_rest())
        assert not [word for word in given.remaining if not word.startswith("--")], "a value without its flag"


@pytest.mark.parametrize("path", ALL, ids=name)
def test_files_that_are_named_exist(path: Path) -> None:
    named = re.findall(
        r"(?<![\w/.])(?:examples|library|test|configs|docs)/[\w./-]*\w", path.read_text(encoding="utf-8")
    )
    assert named and not [each for each in named if not (ROOT / each).exists()]


# --- schedulers


def test_the_batch_script_is_a_shell_script() -> None:
    script = EXAMPLES / "slurm" / "sdxl.sbatch"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = script.read_text(encoding="utf-8").splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(options) < min(commands)  # Slurm reads none behind the first command
    assert "#SBATCH --ntasks-per-node=1" in lines


def test_the_batch_script_starts_one_launcher_a_machine(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODEL": "a model", "IMAGES": "images"}
    command = ["bash", str(EXAMPLES / "slurm" / "sdxl.sbatch"), "--learning_rate=1e-5"]
    words = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    at = words.index("difftrain")
    assert "--ntasks-per-node=1" in words[:at] and words[at + 1 : at + 4] == ["launch", "nm", "sdxl"]
    assert "--model_name=a model" in words and words[-1] == "--learning_rate=1e-5"
    del environ["IMAGES"]
    assert subprocess.run(command, env=environ, capture_output=True).returncode != 0


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def containers(node: Any) -> list[dict[str, Any]]:
    """Return every container of a manifest."""
    if isinstance(node, list):
        return [found for each in node for found in containers(each)]
    if not isinstance(node, dict):
        return []
    return [*node.get("containers", []), *containers([value for key, value in node.items() if key != "containers"])]


@pytest.mark.parametrize("path", MANIFESTS, ids=name)
def test_manifests_use_images_that_a_dockerfile_here_makes(path: Path) -> None:
    made = {f"difftrain:{file.name.partition('.')[2]}" for file in DOCKERFILES}
    for container in containers(load(path)):
        assert container["image"] in made and container["args"][0] in COMMANDS
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/dev/shm" in mounted
        paths = [word.partition("=")[2] for word in container["args"] if "=/" in word]
        assert paths and all(any(each.startswith(f"{place}/") for place in mounted) for each in paths)


def test_a_pytorchjob_is_read() -> None:
    job = load(EXAMPLES / "kubernetes" / "pytorchjob.yaml")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    pods = sum(kind["replicas"] for kind in replicas.values())
    assert all(kind["template"]["spec"]["containers"][0]["name"] == "pytorch" for kind in replicas.values())
    sets = {"MASTER_ADDR": "sdxl-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": str(pods), "RANK": "1"}
    reading = schedulers.read(sets)
    assert not reading.faults and reading.values["nnodes"] == pods == 2


def test_a_jobset_is_read() -> None:
    job = load(EXAMPLES / "kubernetes" / "jobset.yaml")
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    (container,) = containers(job)
    environ = {each["name"]: each["value"] for each in container["env"]}
    reading = schedulers.read(environ | {"JOB_COMPLETION_INDEX": "1"})
    assert not reading.faults and spec["completionMode"] == "Indexed"
    assert reading.values["nnodes"] == spec["parallelism"] == spec["completions"]
    subdomain = job["spec"]["network"]["subdomain"]
    assert reading.values["master_ip"] == f"{job['metadata']['name']}-{workers['name']}-0-0.{subdomain}"


def test_a_volcano_job_is_read() -> None:
    job = load(EXAMPLES / "volcano" / "job.yaml")
    (task,) = job["spec"]["tasks"]
    assert job["spec"]["minAvailable"] == task["replicas"] and {"env", "svc"} <= job["spec"]["plugins"].keys()
    hosts = ",".join(f"sdxl-{task['name']}-{index}.sdxl" for index in range(task["replicas"]))
    reading = schedulers.read({"VC_TASK_INDEX": "1", f"VC_{task['name'].upper()}_HOSTS": hosts})
    assert not reading.faults and reading.values["nnodes"] == task["replicas"]


# --- containers


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, lines that continue joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in text.split("\n")) if word
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_dockerfiles(path: Path) -> None:
    found = instructions(path)
    assert {word for word, _ in found} <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    arguments = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
    assert PLAIN_IMAGE.fullmatch(arguments["BASE"]) and ("FROM", "${BASE}") in found

    # what is copied is there, and is all that pip needs
    copied = [source for word, rest in found if word == "COPY" for source in rest.split()[:-1]]
    assert not [source for source in copied if not (ROOT / source).exists()]
    assert set(copied) >= NEEDED and len(set(copied) - NEEDED) == 1
    wanted = next(source for source in copied if source.startswith("requirements"))
    assert any(word == "RUN" and f"-r {wanted}" in rest for word, rest in found)

    # difftrain is process 1, or becomes it: signals reach it, and the arguments of `docker run` are its own
    entry = json.loads(next(rest for word, rest in found if word == "ENTRYPOINT"))
    assert entry == ["difftrain"] or (entry[:2] == ["/bin/bash", "-c"] and entry[2].endswith('exec difftrain "$@"'))
    assert json.loads(next(rest for word, rest in found if word == "CMD")) == ["--help"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_shell_in_dockerfiles_parses(path: Path) -> None:
    for word, rest in instructions(path):
        text = rest if word == "RUN" else json.loads(rest)[2] if word == "ENTRYPOINT" and "-c" in rest else ""
        assert subprocess.run(["bash", "-n", "-c", text], capture_output=True).returncode == 0, text


def test_canns_image_has_the_torch_that_belongs_to_it() -> None:
    arguments = dict(
        rest.split("=", 1)
        for word, rest in instructions(EXAMPLES / "docker" / "Dockerfile.cann")
        if word == "ARG" and "=" in rest
    )
    cann = arguments["BASE"].partition(":")[2].split("-")[0]
    assert any(
        (pair.torch_npu, pair.torch, pair.cann) == (arguments["TORCH_NPU"], arguments["TORCH"], cann)
        for pair in versions.PAIRS
    )


# --- the page


def test_the_page_names_every_example_and_every_variable() -> None:
    page = (ROOT / "docs" / "multi_machine.md").read_text(encoding="utf-8")
    assert not [name(path) for path in ALL if f"examples/{name(path)}" not in page and path not in DOCKERFILES]
    assert not [row.name for row in schedulers.SCHEDULERS if row.name not in page]
    read = {variable for row in schedulers.SCHEDULERS for each in row.variables.values() for variable, _ in each}
    assert not {variable for variable in read if variable not in page}
    docker = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
    assert not [name(path) for path in DOCKERFILES if f"examples/{name(path)}" not in docker]
