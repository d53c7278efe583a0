"""What a cache holds, without reading it through: from metadata.db, the sizes of files, and some entries."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from difftrain.cache.store import references
from difftrain.cache.store.folder import BIN, IDX, CacheFolder
from difftrain.cache.store.format import FEATURES, FORMAT, Damaged, feature_spans
from difftrain.cache.store.index import Metadata, SegmentInfo
from difftrain.cache.store.journals import Journal
from difftrain.cache.tools.compact import referenced_numbers, retry_while_changing
from difftrain.contracts import DataFault

LOOKED_AT = 2000  # entries of an encoder whose features are measured
COUNTED = 5_000_000  # entries up to which those that nothing wants are counted
_HEAD = 1 << 14  # bytes of an entry that tell its features


def describe(folder: CacheFolder) -> dict[str, Any]:
    """Return facts of a cache, as JSON. Raises DataFault."""
    notes: list[str] = []
    known = _known(folder, notes)
    infos = known.segments() if known is not None else []
    facts: dict[str, Any] = {
        "cache": str(folder.path),
        "format": FORMAT,
        "entries": known.count if known is not None else None,
        "bytes": sum(info.bytes for info in infos) if known is not None else None,
        "rejects": len(known.rejects()) if known is not None else None,
        **_summed(encoders := _encoders(folder, infos)),
        "encoders": encoders,
        "segments": _segments(folder, known),
        "dropped": sum(map(len, references.offsets_of(folder).values())),
        "uses": retry_while_changing(folder, lambda every: [_use(use) for use in every]),
        "unused": _unused(folder, known, notes),
        "writable": folder.writable,
    }
    if not facts["uses"] and facts["entries"]:
        notes.append("no known configuration uses it")
    return {**facts, "notes": notes}


def _known(folder: CacheFolder, notes: list[str]) -> Metadata | None:
    try:
        known = Metadata(folder.database)
        _ = known.count
        return known
    except DataFault as fault:
        if not folder.names():
            notes.append("nothing was built in it yet")
        else:
            notes.append(f"entries cannot be counted: {fault}")
    return None


# --- encoders ---


def _encoders(folder: CacheFolder, infos: list[SegmentInfo]) -> list[dict[str, Any]]:
    """Sum up what each encoder of each fingerprint and storage has made."""
    alike: dict[tuple[str, ...], list[SegmentInfo]] = {}
    for info in infos:
        words = (str(info.header.get(word, "")) for word in ("encoder", "fingerprint", "storage"))
        alike.setdefault(tuple(words), []).append(info)
    encoders = []
    for (encoder, fingerprint, storage), same in sorted(alike.items()):
        features, looked_at = _features(folder, same)
        encoders.append(
            {
                "encoder": encoder,
                "fingerprint": fingerprint,
                "storage": storage,
                "entries": sum(info.entries for info in same),
                "bytes": sum(info.bytes for info in same),
                "segments": len(same),
                "features": features,
                "measured": looked_at,
            }
        )
    return encoders


def _summed(encoders: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what scripts ask for first: bytes a sample of each feature, fingerprints of each encoder."""
    sizes: dict[str, float] = {}
    weights: Counter[str] = Counter()
    fingerprints: dict[str, list[str]] = {}
    for encoder in encoders:
        fingerprints.setdefault(encoder["encoder"], []).append(encoder["fingerprint"])
        for name, feature in encoder["features"].items():
            weights[name] += encoder["entries"]
            sizes[name] = sizes.get(name, 0.0) + feature["bytes_per_sample"] * encoder["entries"]
    mean = {name: round(size / max(1, weights[name]), 1) for name, size in sizes.items()}
    return {
        "bytes_per_sample": mean,
        "fingerprints": {name: sorted(set(fingerprint)) for name, fingerprint in fingerprints.items()},
    }


def _features(folder: CacheFolder, infos: list[SegmentInfo]) -> tuple[dict[str, Any], int]:
    """Measure features of entries that are spread over the segments; also return of how many."""
    sizes: Counter[str] = Counter()
    features: dict[str, dict[str, Any]] = {}
    count = 0
    step = max(1, len(infos) // 50)
    chosen = [info for info in infos[::step] if info.entries]
    for info in chosen:
        for name, dtype, shape, size in _measured(folder, info, max(1, LOOKED_AT // len(chosen))):
            if not name:
                count += 1
                continue
            sizes[name] += size
            facts = features.setdefault(name, {"dtypes": [], "shapes": []})
            if dtype not in facts["dtypes"]:
                facts["dtypes"].append(dtype)
            if shape not in facts["shapes"] and len(facts["shapes"]) < 8:
                facts["shapes"].append(shape)
    for name, feature in features.items():
        feature["bytes_per_sample"] = round(sizes[name] / count, 1)
    return features, count


def _measured(folder: CacheFolder, info: SegmentInfo, most: int) -> Iterator[tuple[str, str, list[int], int]]:
    """Yield name, dtype, shape and bytes of the features of some entries; an empty name begins an entry."""
    with suppress(OSError, Damaged, ValueError):  # it may just be taken away; verify is there to complain
        rows = np.concatenate([rows for rows, _ in islice(Journal(folder, info.name).rows(), 1)])
        rows = rows[rows["kind"] == FEATURES]
        with folder.open_file(info.name, BIN) as file:
            for row in rows[:: max(1, len(rows) // most)][:most]:
                head = os.pread(file.fileno(), min(int(row["length"]), _HEAD), int(row["offset"]))
                yield "", "", [], 0
                for span in feature_spans(head):
                    size = span.stop - span.start + (span.scales_stop - span.scales if span.scales else 0)
                    yield span.name, span.dtype, list(span.shape), size


# --- files ---


def _segments(folder: CacheFolder, known: Metadata | None) -> dict[str, Any]:
    """Count the files of segments, and the journal rows that metadata.db does not know yet."""
    rows = dict(known.query("SELECT name, rows FROM segments")) if known is not None else {}
    count = unsealed = size = behind = 0
    for name in folder.names():
        with suppress(OSError):
            size += folder.file(name, BIN).stat().st_size + folder.file(name, IDX).stat().st_size
            count += 1
        if not folder.sealed(name):
            unsealed += 1
        if not folder.sealed(name) or name not in rows:
            with suppress(OSError, Damaged):
                behind += max(0, Journal(folder, name).length() - rows.get(name, 0))
    return {"count": count, "unsealed": unsealed, "bytes_on_disk": size, "entries_not_in_database": behind}


# --- uses ---


def _use(use: references.Reference) -> dict[str, Any]:
    return {
        "id": use.id,
        "whole": use.complete,
        "used_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(use.used_at)),
        "wants": {encoder: len(use.rows(encoder)) for encoder in use.encoders},
        "facts": dict(use.facts),
    }


def _unused(folder: CacheFolder, known: Metadata | None, notes: list[str]) -> dict[str, int] | None:
    """Count the entries that no configuration wants."""
    if known is None:
        return None
    if known.count > COUNTED:
        notes.append("unused entries are not counted in a cache of this size: difftrain cache gc --dry_run does")
        return None
    needed = referenced_numbers(folder, known)
    entries = size = 0
    for number, length in known.query("SELECT number, length FROM entries"):
        if not needed[number >> 3] & (1 << (number & 7)):
            entries, size = entries + 1, size + length
    return {"entries": entries, "bytes": size}


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Say it in words."""
    segments = facts["segments"]
    yield f"{facts['cache']}: format {facts['format']}, {'' if facts['writable'] else 'read-only, '}" + (
        f"{segments['count']:,} segments, {size_text(segments['bytes_on_disk'])} on disk"
    )
    if facts["entries"] is not None:
        yield f"{facts['entries']:,} entries, {size_text(facts['bytes'])}, of which {facts['rejects']:,} rejected"

    # encoders and their features
    for encoder in facts["encoders"]:
        yield (
            f"{encoder['encoder']}: {encoder['entries']:,} entries, {size_text(encoder['bytes'])}, stored as "
            f"{encoder['storage'] or 'it came'}, fingerprint {encoder['fingerprint']}"
        )
        for name, feature in encoder["features"].items():
            shapes = ", ".join("x".join(map(str, shape)) for shape in feature["shapes"][:4])
            more = ", ..." if len(feature["shapes"]) > 4 else ""
            yield f"  {name}: {feature['bytes_per_sample']:,.0f} bytes a sample, {'/'.join(feature['dtypes'])}, {shapes}{more}"

    # who wants them, and what is left to do
    for use in facts["uses"]:
        wants = ", ".join(f"{count:,} of {encoder}" for encoder, count in use["wants"].items())
        yield f"use {use['id']}: needs {wants}; {'complete' if use['whole'] else 'incomplete'}, last used {use['used_at']}"
    if segments["unsealed"]:
        yield f"{segments['unsealed']:,} segments are not sealed: a build is running, or was stopped"
    if segments["entries_not_in_database"]:
        yield f"{segments['entries_not_in_database']:,} entries are newer than metadata.db; the next build adds them"
    if facts["dropped"]:
        yield f"{facts['dropped']:,} entries are dropped"
    if facts["unused"] and facts["unused"]["entries"]:
        unused = facts["unused"]
        yield f"{unused['entries']:,} entries, {size_text(unused['bytes'])}, unused: difftrain cache gc frees them"
    yield from facts["notes"]


def size_text(size: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
