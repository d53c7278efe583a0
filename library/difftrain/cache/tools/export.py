"""Giving cached features to other programs: of one configuration by record, all encoders' together; or by address.

A folder of an export is whole or absent: it is written beside its place, and gets its name at the end.
"""

from __future__ import annotations

import json
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from difftrain.cache.remote import fetch_cache
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import REJECT, Damaged, StoredFeature, meta_of, unpack
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.segment import SegmentFiles, SegmentSource, checked_payload
from difftrain.cache.store.storage import restore
from difftrain.cache.tools.export_files import (
    EMPTY_CAPTION_KEY,
    LAYOUTS,
    ExportPart,
    ExportSample,
    SampleEntries,
    SampleEntry,
    ShardWriter,
    by_address,
    by_record,
    choose_reference,
    encoders_of,
)
from difftrain.config.paths import is_url, shown_url
from difftrain.contracts import ConfigFault, DataFault, Fault, TrainingFault
from difftrain.io import process

Log = Callable[[str], None]
MASKS = "masks"  # of which not every record has one
NAMED = 1000  # damaged entries that are named; all are counted
_AT_ONCE = 16  # samples that are asked for together
_SAY_S = 10.0
_UNREADABLE = (Damaged, ValueError, IndexError, KeyError, struct.error)


@dataclass
class ExportReport:
    """What an export has written and what not. damaged: in words, the first NAMED of num_damaged entries."""

    samples: int = 0
    shards: int = 0
    bytes: int = 0
    rejected: int = 0  # samples of which an encoder could make nothing
    incomplete: int = 0  # samples that the configuration has no entry of some encoder for
    num_damaged: int = 0
    damaged: list[str] = field(default_factory=list)
    use: str = ""

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self)}


def export(
    cache: Path | str,
    output: Path | str,
    layout: Literal["webdataset", "safetensors"],
    *,
    encoders: Sequence[str] | None = None,
    use: str | None = None,
    shard_bytes: int = 1 << 30,
    values: Literal["plain", "storage"] = "plain",
    log: Log = print,
) -> ExportReport:
    """Write the features of a cache into a new folder. What is damaged is named and left out with its sample.

    cache: a folder, or the URL of one. use: the id of a configuration that was built to its end, the one that was used
    last unless given (of a URL it must be, where there are several); where there is none, every entry is a sample. values: plain makes bf16 of 8-bit floats, storage
    keeps them, beside their scales.
    Raises: ConfigFault for arguments, DataFault where no cache is there, TrainingFault where the output cannot be written.
    """
    # what is to be written
    output = _output_folder(output, layout, shard_bytes)
    folder, source, fetch_rows = _open_cache(cache, log)
    metadata = Metadata(folder.database)
    used, note = choose_reference(folder, use, dated=not is_url(str(cache)))
    if note:
        log(f"export: {note}")
    named = encoders_of(metadata, used, encoders)
    if used is None:
        wishes = by_address(metadata, named)
    else:
        fetch_rows(used.id)
        wishes = by_record(metadata, used, named)
    report = ExportReport(use=used.id if used else "")
    facts = {"cache": shown_url(str(cache)), "layout": layout, "values": values, "use": report.use, "encoders": named}

    # it is written aside, and gets its name when it is whole
    aside = _begin_aside(output)
    shards: ShardWriter = LAYOUTS[layout](aside, shard_bytes)
    try:
        _write(wishes, source, shards, report, values, required=set(named) - {MASKS} if used else set(), log=log)
        if not report.samples + report.num_damaged:
            raise DataFault(
                f"{shown_url(str(cache))}: there are no entries of {', '.join(named) or 'any encoder'} to export"
            )
        shards.close()
        report.shards, report.bytes = shards.count, shards.bytes
        counts = {name: value for name, value in report.summary().items() if name != "damaged"}
        (aside / "export.json").write_text(json.dumps({**facts, **counts}, indent=2) + "\n", encoding="utf-8")
        (aside / _OWNER).unlink()
        if output.exists():
            output.rmdir()  # it was empty
        aside.rename(output)
    except OSError as error:
        raise TrainingFault(
            f"{output}: the export cannot be written ({error.strerror or error}); nothing of it is kept. Free some "
            "space there, or name another folder"
        ) from error
    finally:
        shards.abandon()
        shutil.rmtree(aside, ignore_errors=True)
    return report


# --- what is wanted ---


def _output_folder(folder: Path | str, layout: str, shard_bytes: int) -> Path:
    """Return the folder to make. Raises ConfigFault with every fault."""
    faults, output = [], Path(folder)
    if layout not in LAYOUTS:
        faults.append(Fault("--format", f"{layout!r} is unknown", f"give one of {', '.join(LAYOUTS)}"))
    if shard_bytes < 1:
        faults.append(Fault("--shard_gib", f"must be above 0, got {shard_bytes} bytes"))
    if is_url(str(folder)):
        what = f"{str(folder)!r} is not a folder of this machine"
        faults.append(Fault("--output", what, "export to a folder, and copy that"))
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        faults.append(Fault("--output", f"{str(folder)!r} is there and not empty", "name another folder"))
    if faults:
        raise ConfigFault(faults)
    return output


def _open_cache(cache: Path | str, log: Log) -> tuple[CacheFolder, SegmentSource, Callable[[str], None]]:
    """Open a cache: its folder, what reads its segments, and what fetches the rows of a use."""
    if is_url(str(cache)):
        remote = fetch_cache(str(cache), log=log)
        return CacheFolder.open(remote.folder), remote.segments, remote.fetch_rows
    folder = CacheFolder.open(cache)
    return folder, SegmentFiles(folder), lambda use: None


# --- reading and writing ---


def _write(
    wishes: Iterator[SampleEntries],
    source: SegmentSource,
    shards: ShardWriter,
    report: ExportReport,
    values: str,
    *,
    required: set[str],
    log: Log,
) -> None:
    reported = time.monotonic()
    while some := list(islice(wishes, _AT_ONCE)):
        rows = [entry.row for wish in some for entry in wish.entries if entry.row is not None]
        source.want([(row.segment, row.offset, row.length) for row in rows if row.kind != REJECT])
        for wish in some:
            if any(entry.row is not None and entry.row.kind == REJECT for entry in wish.entries):
                report.rejected += 1
            elif required - {entry.encoder for entry in wish.entries} and wish.key != EMPTY_CAPTION_KEY:
                report.incomplete += 1
            elif (sample := _sample(wish, source, report, values, log)) is not None:
                shards.add(sample)
                report.samples += 1
        if time.monotonic() - reported > _SAY_S:
            reported = time.monotonic()
            log(f"export: {report.samples:,} samples, {shards.bytes / 2**30:,.1f} GiB")


def _sample(
    wish: SampleEntries, source: SegmentSource, report: ExportReport, values: str, log: Log
) -> ExportSample | None:
    """Read a sample; None where something of it is damaged."""
    parts: list[ExportPart] = []
    descriptions: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"key": wish.key, "parts": descriptions}
    complete = True
    for entry in wish.entries:
        suffix = f"-{entry.variant}" if entry.variant else ""
        try:
            if entry.row is None:
                raise Damaged("it is not in the cache")
            payload = checked_payload(source, entry.row)
            stored, meta = unpack(payload), meta_of(payload)
            tensors = {name: value for feature in stored for name, value in _tensors(feature, values).items()}
        except _UNREADABLE as error:
            complete = False
            _name_damaged(entry, wish.key, error, report, log)
            continue

        # its tensors, and what they do not say of themselves
        part = ExportPart(entry.encoder + suffix, suffix, tensors)
        parts.append(part)
        features = {feature.name: _feature_facts(feature) for feature in stored}
        descriptions.append(
            {"part": part.name, "encoder": entry.encoder, "variant": entry.variant, "address": entry.address.hex()}
            | meta
            | {"features": features}
        )
        for name, value in meta.items():
            facts.setdefault(name, value)
    return ExportSample(wish.key, facts, parts) if complete else None


def _tensors(stored: StoredFeature, values: str) -> Mapping[str, Tensor]:
    """Return a feature as a tensor of its whole shape, and as it is stored also its scales."""
    if stored.dtype != "float8_e4m3fn" or values == "plain":
        dtype = torch.bfloat16 if stored.dtype == "float8_e4m3fn" else getattr(torch, stored.dtype)
        made = torch.empty(stored.shape, dtype=dtype)
        restore(stored, made)
        return {stored.name: made}
    assert stored.scales is not None
    raw = torch.zeros(stored.shape, dtype=torch.uint8)
    kept = raw[: stored.rows]
    kept.copy_(torch.from_numpy(stored.data.copy()).view(kept.shape))
    scales = torch.ones(1 if len(stored.shape) == 1 else stored.shape[0])
    scales[: len(stored.scales)] = torch.from_numpy(stored.scales.copy())
    return {stored.name: raw.view(torch.float8_e4m3fn), f"{stored.name}.scales": scales}


def _feature_facts(stored: StoredFeature) -> dict[str, Any]:
    """Say of a feature what its tensor does not. rows: of the first axis, how many are not padding."""
    return {"shape": list(stored.shape), "stored_as": stored.dtype, "rows": stored.rows}


def _name_damaged(entry: SampleEntry, key: str, error: Exception, report: ExportReport, log: Log) -> None:
    position = f" (segment {entry.row.segment}, byte {entry.row.offset:,})" if entry.row else ""
    words = f"{entry.encoder} of sample {key}, address {entry.address.hex()}{position}: {error}"
    report.num_damaged += 1
    if len(report.damaged) < NAMED:
        report.damaged.append(words)
        log(f"export: damaged: {words}")


_OWNER = "owner"


def _begin_aside(output: Path) -> Path:
    """Make the folder that an export is written in; what a killed one has left goes."""
    aside = output.parent / f".{output.name}.partial-{uuid.uuid4().hex}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for left in output.parent.glob(f".{output.name}.partial-*"):
            owner = left / _OWNER
            if owner.exists() and process.is_gone(owner.read_text()):
                shutil.rmtree(left, ignore_errors=True)
        aside.mkdir()
        (aside / _OWNER).write_text(process.this_process())
    except OSError as error:
        what = f"{str(output)!r} cannot be made ({error.strerror or error})"
        raise ConfigFault([Fault("--output", what, "name another folder")]) from error
    return aside
