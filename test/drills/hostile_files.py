"""Give a trainer the models and images of strangers: every one is named or used, nothing hangs, no traceback, no code of theirs.

    python test/drills/hostile_files.py [--only models|images] [--name WORD] [--list]

Prints one line a kind: how many there were, refused, used, tracebacks, without end, silent (used and should not have been).
Ends with 1 where any of the last three is not 0, or where code of a file ran. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT.parents[1] / "library")]

import doors  # noqa: E402
import hostile_images  # noqa: E402
import warm  # noqa: E402

LIMIT_S = 60.0
DEEP = 100_000
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class HostileModel:
    """One change of a whole model. kind: of files that it is tried on. may_train: harmless, so that training is right too."""

    name: str
    kind: str
    change: Callable[[Path], None]
    may_train: bool = False


# ------------------------------------------------------------------ what is changed, and how


def in_json(file: str, **changes: Any) -> Callable[[Path], None]:
    """Set keys of a JSON file of a model's folder; ... removes one."""

    def change(model: Path) -> None:
        content = json.loads((model / file).read_text())
        for key, value in changes.items():
            content.pop(key, None) if value is ... else content.update({key: value})
        (model / file).write_text(json.dumps(content))

    return change


def as_text(file: str, text: str | bytes) -> Callable[[Path], None]:
    """Replace a file's content."""
    data = text.encode() if isinstance(text, str) else text
    return lambda model: (model / file).write_bytes(data) and None


def as_pipe(file: str) -> Callable[[Path], None]:
    """Put a pipe in place of a file."""

    def change(model: Path) -> None:
        (model / file).unlink(missing_ok=True)
        os.mkfifo(model / file)

    return change


def as_link(file: str, target: str) -> Callable[[Path], None]:
    """Put a link in place of a file."""

    def change(model: Path) -> None:
        (model / file).unlink(missing_ok=True)
        (model / file).symlink_to(target)

    return change


def in_header(**changes: Any) -> Callable[[Path], None]:
    """Set metadata of a single file to any text, or its __metadata__ to any JSON; "tensors" changes the first entry."""

    def change(model: Path) -> None:
        data = model.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if "tensor" in changes:
            name = next(key for key in header if key != "__metadata__")
            header[name] = header[name] | changes["tensor"]
        elif "metadata" in changes:
            header["__metadata__"] = changes["metadata"]
        else:
            header["__metadata__"] = header.get("__metadata__", {}) | changes
        text = json.dumps(header).encode()
        model.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change


def with_tensor(file: str, needle: str, value: float, count: int = 1) -> Callable[[Path], None]:
    """Set numbers of the first tensor whose name has a word to a value."""

    def change(model: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = model / file if file else model
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(path)
        name = next(name for name in sorted(tensors) if needle in name)
        tensors[name].view(-1)[:count] = value
        save_file(tensors, path, metadata=metadata)

    return change


class Ran:
    """What a pickle would call."""

    def __reduce__(self) -> Any:
        return os.system, ("touch $HOSTILE_RAN",)


def as_checkpoint(make: Callable[[Path], bytes | None]) -> Callable[[Path], None]:
    """Replace a .ckpt by bytes."""

    def change(model: Path) -> None:
        data = make(model)
        if data is not None:
            model.write_bytes(data)

    return change


def zipped(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """Lay a pickle out as torch does."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/data/{name}", data)
    return file.getvalue()


def short_record(model: Path) -> bytes:
    """Cut every second record of the archive to half of its bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(model) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as cut:
        for number, info in enumerate(archive.infolist()):
            data = archive.read(info)
            is_data = "/data/" in info.filename
            cut.writestr(info.filename, data[: len(data) // 2] if is_data and number % 2 and len(data) > 64 else data)
    return out.getvalue()


def merges_without_tokens(model: Path) -> None:
    """Write five million merges whose pieces no vocabulary has."""
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n" + "qqx zzy\n" * 5_000_000)


def ids_as(value: Any) -> Callable[[Path], None]:
    """Give one token of the first vocabulary another id."""

    def change(model: Path) -> None:
        path = model / "tokenizer" / "vocab.json"
        ids = json.loads(path.read_text())
        ids[sorted(ids)[300]] = value
        path.write_text(json.dumps(ids))

    return change


# ------------------------------------------------------------------ the models


NOT_OBJECTS = {"null": "null", "number": "5", "text": '"x"', "list": "[1, 2]", "deep": "[" * DEEP, "deep objects": '{"a":' * DEEP,
               "empty": "", "not UTF-8": b"\xff\xfe{}"}  # fmt: skip
JSON_FILES = ("model_index.json", "unet/config.json", "vae/config.json", "text_encoder/config.json")
ODD = {"a text": "x", "an object": {"a": 1}, "some texts": ["x"], "true": True, "huge": 10**30, "NaN": float("nan"),
       "negative": -5, "10 million": 10**7}  # fmt: skip
SIZES = (
    ("text_encoder/config.json", "hidden_size"), ("text_encoder_2/config.json", "num_hidden_layers"),
    ("unet/config.json", "layers_per_block"), ("vae/config.json", "latent_channels"),
)  # fmt: skip


def models() -> Iterator[HostileModel]:
    """Yield them all."""
    # --- files that are no objects, no files, or too deep
    for file in JSON_FILES:
        for kind, text in NOT_OBJECTS.items():
            yield HostileModel(f"{file} is {kind}", "folder", as_text(file, text))
    for file in (*JSON_FILES, "scheduler/scheduler_config.json", "tokenizer/vocab.json"):
        yield HostileModel(f"{file} is a pipe", "folder", as_pipe(file), may_train=file.startswith(("sched", "tok")))
    for kind in ("null", "list", "deep"):
        name = "scheduler/scheduler_config.json"
        yield HostileModel(f"{name} is {kind}", "folder", as_text(name, NOT_OBJECTS[kind]), may_train=True)
    for file in ("unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"):
        yield HostileModel(f"{file} is a pipe", "folder", as_pipe(file))
        yield HostileModel(f"{file} is endless", "folder", as_link(file, "/dev/zero"))
        yield HostileModel(f"{file} is empty", "folder", as_text(file, ""))
    for value in (["StableDiffusionXLPipeline"], None, 5, {}, "os.system", "", "../../x"):
        yield HostileModel(f"_class_name is {value!r}", "folder", in_json("model_index.json", _class_name=value))

    # --- sizes of another type, or without an end
    for file, key in SIZES:
        for kind, value in ODD.items():
            yield HostileModel(f"{file} {key} is {kind}", "folder", in_json(file, **{key: value}))
    for file, key, value in (
        ("unet/config.json", "sample_size", {"a": 1}), ("text_encoder/config.json", "hidden_act", "strange"),
        ("text_encoder/config.json", "hidden_act", "os.system"), ("unet/config.json", "act_fn", "strange"),
        ("vae/config.json", "scaling_factor", "x"), ("vae/config.json", "scaling_factor", float("nan")),
        ("vae/config.json", "scaling_factor", 0), ("vae/config.json", "scaling_factor", float("inf")),
        ("vae/config.json", "act_fn", "strange"), ("vae/config.json", "norm_num_groups", 0),
        ("text_encoder/config.json", "num_hidden_layers", 10**8), ("unet/config.json", "layers_per_block", 10**7),
        ("vae/config.json", "layers_per_block", 10**7), ("text_encoder/config.json", "layer_norm_eps", float("nan")),
        ("text_encoder/config.json", "vocab_size", 10**12), ("text_encoder/config.json", "max_position_embeddings", 10**10),
        ("vae/config.json", "block_out_channels", []), ("vae/config.json", "block_out_channels", [[1]]),
        ("unet/config.json", "block_out_channels", [0, 0]), ("unet/config.json", "down_block_types", ["os.system"]),
        ("unet/config.json", "down_block_types", "DownBlock2D"),
    ):  # fmt: skip
        yield HostileModel(f"{file} {key} is {value!r}", "folder", in_json(file, **{key: value}))
    for asked in ({"auto_map": {"AutoModel": "code.Model"}}, {"attn_implementation": "strangers/kernel"},
                  {"quantization_config": {"quant_method": "gptq"}}):  # fmt: skip
        yield HostileModel(
            f"asks for {next(iter(asked))}", "folder", in_json("text_encoder/config.json", **asked), may_train=True
        )
    for kind, value in {"a text": "v", "NaN": float("nan"), "a list": [1], "an object": {}}.items():
        name = "scheduler/scheduler_config.json"
        yield HostileModel(
            f"scheduler prediction_type is {kind}", "folder", in_json(name, prediction_type=value), may_train=True
        )

    # --- vocabularies
    for kind, value in {
        "a text": "7",
        "a float": 7.5,
        "huge": 10**40,
        "negative": -1,
        "null": None,
        "a list": [1],
    }.items():
        yield HostileModel(f"an id is {kind}", "folder", ids_as(value))
    for kind in ("null", "list", "deep", "number"):
        yield HostileModel(f"vocab.json is {kind}", "folder", as_text("tokenizer/vocab.json", NOT_OBJECTS[kind]))
    yield HostileModel("merges without tokens", "folder", merges_without_tokens)
    yield HostileModel("merges.txt is endless", "folder", as_link("tokenizer/merges.txt", "/dev/zero"), may_train=True)

    # --- values
    vae, text = "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
    for file, needle, value in (
        (vae, "encoder.conv_in.weight", float("nan")), (vae, "quant_conv.bias", float("inf")),
        (text, "token_embedding", float("inf")), (text, "final_layer_norm", float("-inf")),
        ("unet/diffusion_pytorch_model.safetensors", "conv_in.weight", float("nan")),
    ):  # fmt: skip
        yield HostileModel(
            f"{file.partition('/')[0]} {needle} holds {value}", "folder", with_tensor(file, needle, value)
        )

    # --- one file: its metadata, its header, its tensors
    for kind, said in NOT_OBJECTS.items():
        if isinstance(said, str):
            change = in_header(**{"difftrain.architecture": said})
            yield HostileModel(f"architecture is {kind}", "file", change)
    for value in (None, 5, "x", [1], {"a": 5}, {"a": None}):
        yield HostileModel(f"__metadata__ is {value!r}", "file", in_header(metadata=value), may_train=value is None)
    for entry in ({"dtype": "F99"}, {"shape": [-1, 5]}, {"shape": "x"}, {"data_offsets": [0, 10**15]}, {"data_offsets": [5, 1]},
                  {"shape": [10**12]}, {"data_offsets": None}, {"shape": [2.5]}):  # fmt: skip
        yield HostileModel(f"a tensor has {entry}", "file", in_header(tensor=entry))
    yield HostileModel("a header of 2^63 bytes", "file", lambda model: model.write_bytes(b"\xff" * 8 + b"{}") and None)
    yield HostileModel(
        "a deep header", "file", lambda model: model.write_bytes(struct.pack("<Q", DEEP) + b"[" * DEEP) and None
    )

    # --- pickles
    pickles: dict[str, Callable[[Path], bytes | None]] = {
        "code, raw": lambda model: pickle.dumps(Ran()),
        "code, zipped": lambda model: zipped(pickle.dumps({"state_dict": Ran()})),
        "code in a list": lambda model: zipped(pickle.dumps({"a": [[Ran()]]})),
        "5 million marks": lambda model: b"\x80\x02" + b"(" * 5_000_000,
        "5 million marks, zipped": lambda model: zipped(b"\x80\x02" + b"(" * 5_000_000 + b"."),
        "5 million lists": lambda model: zipped(b"\x80\x02" + b"]0" * 2_500_000 + b"}."),
        "deep": lambda model: zipped(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
        "no dictionary": lambda model: zipped(pickle.dumps([1, 2])),
        "no tensors": lambda model: zipped(pickle.dumps({"a": 5})),
        "a short record": short_record,
        "empty": lambda model: b"",
        "a zip of nothing": lambda model: zipped(b""),
        "not UTF-8 keys": lambda model: zipped(pickle.dumps({b"\xff": 1, 5: 2})),
    }
    for kind, make in pickles.items():
        yield HostileModel(f"pickle: {kind}", "pickle", as_checkpoint(make))


# ------------------------------------------------------------------ a run of each


class Trial:
    """Runs of two steps on one model each, in processes forked from one that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran = folder / "ran"
        self.door = doors.Door(doors.write_pictures(folder / "images", 4), folder / "cache")
        self.door.popen = warm.popen
        self.door.env |= {"HOSTILE_RAN": str(self.ran), "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        self.whole = {kind: self._saved(kind) for kind in ("folder", "file", "pickle")}

    def _saved(self, kind: str) -> Path:
        out = self.folder / f"whole-{kind}"
        layout = {"folder": "diffusers_safetensors", "file": "safetensors", "pickle": "ckpt"}[kind]
        code, output = self.run(f"--output_dir={out}", f"--save_model_as={layout}", "--init_from_config=tiny")
        assert code == 0, output
        name = {"folder": "NAME", "file": "NAME.safetensors", "pickle": "NAME.ckpt"}[kind]
        return out / name

    def run(self, *flags: str) -> tuple[int | None, str]:
        """Train two steps; return the exit code, None where it came to no end, and what was printed."""
        own = {flag.partition("=")[0] for flag in flags}
        line = [flag for flag in self.door.flags(self.folder / "out", steps=2) if flag.partition("=")[0] not in own]
        line = [flag for flag in line if not flag.startswith(("--save_", "--init_from"))]
        started = self.door.start([*line, *flags])
        try:
            output, _ = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            output, _ = started.communicate()
            return None, output
        return started.returncode, output

    def judge(self, hostile: HostileModel) -> tuple[str, str]:
        """Try one: (refused, used, traceback, no end, silent or CODE RAN; what was printed)."""
        place = self.folder / "model"
        whole = self.whole[hostile.kind]
        if whole.is_dir():
            model = Path(shutil.copytree(whole, place))
        else:
            place.mkdir()
            model = Path(shutil.copyfile(whole, place / whole.name))
        try:
            hostile.change(model)
            shutil.rmtree(self.folder / "out", ignore_errors=True)
            code, output = self.run(f"--pretrained_model_name_or_path={model}")
        finally:
            shutil.rmtree(place)
        if self.ran.exists():
            self.ran.unlink()
            return "CODE RAN", output
        if code is None:
            return "no end", output
        if TRACEBACK in output:
            return "traceback", output
        if code == 0:
            return "used" if hostile.may_train else "silent", output
        return "refused", output


KINDS = ("refused", "used", "traceback", "no end", "silent", "CODE RAN")


def try_models(word: str, verbose: bool) -> Counter[str]:
    """Try every model whose name a word finds."""
    counts: Counter[str] = Counter()
    chosen = [hostile for hostile in models() if re.search(word, hostile.name)]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        for hostile in chosen:
            began = time.monotonic()
            outcome, output = trial.judge(hostile)
            counts[outcome] += 1
            bad = outcome not in ("refused", "used")
            if verbose or bad:
                last = " | ".join(output.strip().splitlines()[-8 if outcome == "traceback" else -2 :])[-900:]
                print(f"  {outcome:10s} {time.monotonic() - began:5.1f} s  {hostile.name}: {last}", flush=True)
    return counts


def line_of(kind: str, counts: Counter[str]) -> str:
    """Write one line of counts."""
    return f"{kind}: {sum(counts.values())} tried; " + ", ".join(f"{counts[each]} {each}" for each in KINDS)


def main(argv: list[str] | None = None) -> int:
    """Try models, then images; print a line each and return 0 where nothing fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("models", "images"))
    parser.add_argument("--name", default="", help="try those whose name a regular expression finds")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(hostile.name for hostile in models()))
        return 0
    totals: Counter[str] = Counter()
    for kind, attempt in (("models", try_models), ("images", hostile_images.try_images)):
        if args.only in (None, kind):
            counts = attempt(args.name, args.verbose)
            print(line_of(kind, counts), flush=True)
            totals += counts
    return int(any(totals[kind] for kind in KINDS[2:]))


if __name__ == "__main__":
    sys.exit(main())
