"""The flags that a launcher owns; every other flag goes to the training script, which knows them all.

A value comes from the command line, else from a shell variable of the same name, else from the recipe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Caller:
    """How a launch was asked for, so that messages name what the user can type.

    noun: what it calls itself. layouts: layout -> what runs it. door: what every other flag goes to, with %s for its name.
    """

    noun: str
    layouts: Mapping[str, str]
    door: str
    output: str

    def layout(self, name: str) -> str:
        """Return what runs a layout."""
        return self.layouts[name]


SCRIPTS = Caller(
    "script",
    {"nm_np": "test/pretrain_full_nm_np_*.sh", "1m_8p": "test/pretrain_full_1m_8p_*.sh"},
    "sd_scripts_xl/%s",
    "test/output",
)
COMMAND = Caller("launch", {"nm_np": "difftrain launch nm", "1m_8p": "difftrain launch np"}, "difftrain %s", "output")


@dataclass(frozen=True)
class Owned:
    """One flag: its names (the first is what messages say), its door's spelling, what it means."""

    names: tuple[str, ...]
    door: str  # "" where the launcher itself acts on it
    help: str
    kind: str = "str"  # str | int | switch


OWNED: tuple[Owned, ...] = (
    Owned(("batch_size",), "train_batch_size", "images per device and micro batch", "int"),
    Owned(("max_train_epoch", "max_train_epochs"), "max_train_epochs", "epochs; below 120 it is a speed run", "int"),
    Owned(("mixed_precision",), "mixed_precision", "no, fp16 or bf16"),
    Owned(("resolution",), "resolution", "WIDTH,HEIGHT or one number"),
    Owned(
        ("model_name", "pretrain_model_path"),
        "pretrained_model_name_or_path",
        "weights: a diffusers folder or one file",
    ),
    Owned(("vae_model_path",), "vae", "another VAE"),
    Owned(("tokenizer1_path",), "tokenizer1_path", "folder of the first tokenizer"),
    Owned(("tokenizer2_path",), "tokenizer2_path", "folder of the second tokenizer"),
    Owned(("dataset_name",), "train_data_dir", "folder of the data; shapes or emoji: the embedded demo"),
    Owned(("device_id",), "", "the device of a single-device run; also names the output folder", "int"),
    Owned(("performance",), "performance", "a speed run: 13 epochs by default", "switch"),
    Owned(("nnodes",), "", "number of machines", "int"),
    Owned(("nproc_per_node",), "", "devices of each machine", "int"),
    Owned(("node_rank",), "", "number of this machine, from 0", "int"),
    Owned(("master_ip",), "", "address of machine 0"),
    Owned(("master_port",), "", "a free port of machine 0 (8989)", "int"),
    Owned(("ddp_timeout",), "ddp_timeout", "minutes that machines and processes wait for each other (30)", "int"),
    Owned(("max_restarts",), "", "how often the processes start again by themselves after one has failed (0)", "int"),
    Owned(("output_dir",), "", "folder for the run's files, instead of one named after device_id"),
    Owned(("demo_scale",), "", "fraction of the demo's images and steps: 0.1 is a quick look"),
    Owned(("dry_run",), "dry_run", "print what would be done; touches no device", "switch"),
)
_DOOR_NAMES = {flag.names[0]: flag.door for flag in OWNED if flag.door}
_BY_NAME = {name: flag for flag in OWNED for name in flag.names}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass
class LaunchFlags:
    """What the user asked for, and what was wrong with it.

    values: by the first name of each owned flag. origins: the flag or variable a value came from. remaining: words for the
    training script, in their order.
    """

    values: dict[str, str | int | bool] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    remaining: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def number(self, name: str, default: int) -> int:
        """Return a whole number."""
        value = self.values.get(name, default)
        return value if isinstance(value, int) else default

    def text(self, name: str) -> str:
        """Return a text, empty where it was not given."""
        return str(self.values.get(name, ""))

    def names_rest(self) -> set[str]:
        """Return the names of the flags that go to the training script."""
        return {word[2:].split("=")[0] for word in self.remaining if word.startswith("--")}


def read(argv: list[str], environ: Mapping[str, str]) -> LaunchFlags:
    """Sort a command line into owned flags and the rest; add shell variables of the same names."""
    flags = LaunchFlags()
    at = 0
    while at < len(argv):
        word, at = argv[at], at + 1
        name, equals, value = word[2:].partition("=")
        flag = _BY_NAME.get(name) if word.startswith("--") else None
        if flag is None:
            flags.remaining.append(word)
            continue
        if not equals and flag.kind != "switch":
            if at < len(argv) and not argv[at].startswith("--"):
                value, at = argv[at], at + 1
            else:
                flags.faults.append(f"--{name}: its value is missing ({flag.help})")
                continue
        _take(flags, flag, value if equals or flag.kind != "switch" else "1", f"--{name}")
    for name, flag in _BY_NAME.items():
        if environ.get(name, "").strip() and flag.names[0] not in flags.values:
            _take(flags, flag, environ[name], f"the shell variable {name}")
    return flags


def _take(flags: LaunchFlags, flag: Owned, text: str, origin: str) -> None:
    name, text = flag.names[0], text.strip()
    value: str | int | bool = text
    if flag.kind == "switch":
        if text.lower() not in _TRUE + _FALSE:
            flags.faults.append(f"{origin}: is a switch, got {text!r} (give it alone, or true or false)")
            return
        value = text.lower() in _TRUE
    elif not text:
        flags.faults.append(f"{origin}: its value is empty ({flag.help})")
        return
    elif flag.kind == "int":
        if not text.isdecimal():
            flags.faults.append(f"{origin}: must be a whole number, got {text!r} ({flag.help})")
            return
        value = int(text)
    flags.values[name] = value
    flags.origins[name] = origin


def to_door(flags: LaunchFlags, names: Mapping[str, str] = _DOOR_NAMES) -> list[str]:
    """Return the owned flags that were given, in the training script's spelling. names: its names of them."""
    return [f"--{names[name]}" if value is True else f"--{names[name]}={value}" for name, value in owned(flags, names)]


def owned(flags: LaunchFlags, names: Collection[str]) -> Iterator[tuple[str, str | int | bool]]:
    """Yield name and value of the owned flags that were given, of some names, in the table's order."""
    for flag in OWNED:
        value = flags.values.get(flag.names[0])
        if flag.names[0] in names and value is not None and value is not False:
            yield flag.names[0], value


def demo_scale(flags: LaunchFlags, faults: list[str]) -> float:
    """Return --demo_scale, 1 where it was not given; what is wrong with it goes to `faults`."""
    try:
        scale = float(flags.text("demo_scale") or 1)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        faults.append(f"{flags.origins['demo_scale']}: must be above 0 and at most 1, got {flags.text('demo_scale')}")
        scale = 1.0
    return scale


def usage(command: str, door: str, caller: Caller = SCRIPTS) -> str:
    """Return the help of a launcher. command: what the user types. door: what takes the flags that are not listed."""
    lines = [f"usage: {command} [--key=value | --key value] ...", "", "flags of the launcher:"]
    for flag in OWNED:
        names = ", ".join(f"--{name}" for name in flag.names)
        lines.append(f"  {names:38s} {flag.help}")
    lines += [
        "",
        f"Each of these names works as a shell variable too. Every other flag goes to {caller.door % door}",
        "(its --help lists them). With no model and no data the embedded demo runs.",
        f"Files go to {caller.output}/DEVICE_ID. With several machines, settings not given as flags are read from Slurm,",
        "Kubernetes, Volcano, ModelArts or torchrun's PET_* variables: docs/multi_machine.md.",
    ]
    return "\n".join(lines)
