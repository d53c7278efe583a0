"""A cache on disk, as one run uses it: what is there, what is missing, who writes, and what is read in the end."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.cache.manifest.manifest import CacheManifest
from difftrain.cache.request import CacheRequest
from difftrain.cache.store import references
from difftrain.cache.store.compaction import merge
from difftrain.cache.store.folder import BIN, CacheFolder
from difftrain.cache.store.index import Metadata
from difftrain.cache.store.references import Reference
from difftrain.cache.store.segment import SegmentWriter
from difftrain.config.paths import user_cache
from difftrain.config.schema.sections import CacheSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, TrainingFault

log = logging.getLogger("difftrain")
Log = Callable[[str], None]
GIB = 1 << 30
REGENERATING = "regenerating"
_VISIBLE_WITHIN_S = 120.0  # within which a machine must see what another one has written
_DAMAGED_NAMED = 5
_CHUNK = 1 << 20


@dataclass(frozen=True)
class EncoderManifest:
    """One encoder whose features are wanted: its fingerprint, and the list of all its entries."""

    request: CacheRequest
    fingerprint: str
    manifest: CacheManifest


class DiskCache:
    """A cache folder and what a run wants of it. Its methods are each for one process of those that build together."""

    def __init__(
        self,
        folder: CacheFolder,
        section: CacheSection,
        manifests: Sequence[EncoderManifest],
        facts: Mapping[str, Any],
        url: str = "",
    ) -> None:
        """Take what is wanted. facts: what the use says of its configuration. url: of what the folder is a copy of."""
        self.folder, self.section, self.manifests = folder, section, manifests
        self.name, self.remote = url or str(folder.path), bool(url)
        self.writable = not url and folder.writable
        built = {
            manifest.request.name: {"fingerprint": manifest.fingerprint, "storage": manifest.request.storage}
            for manifest in manifests
        }
        self.facts = {**facts, "encoders": built}
        state = [built, *(manifest.manifest.folder.name for manifest in manifests), facts.get("index")]
        self.use = hashlib.blake2b(json.dumps(state).encode(), digest_size=12).hexdigest()
        self.database = folder.database

    # --- before anything is encoded ---

    def look(self) -> tuple[Path, dict[str, np.ndarray]]:
        """Find out what is missing, (N,) bool of each encoder; return it with the database that says so.

        Raises: TrainingFault where segments are damaged, DataFault for another format, ConfigFault where what is
        trusted is of other encoders.
        """
        use = self._known()
        if self.section.trust and use is not None and use.complete and self.database.exists():
            log.info(
                f"{option('cache.trust', True)}: this cache was complete when it was built; it is not checked again"
            )
            references.touch(self.folder, self.use)
            return self.database, {
                manifest.request.name: np.zeros(manifest.manifest.count, bool) for manifest in self.manifests
            }
        if self.section.trust and use is None:
            self._refuse_others()

        # bring the database up to date, once it is known what this run wants
        if self.writable:
            self._announce(use)
        if self.writable or not (self.remote or self.database.exists()):
            self._merge()
        if self.section.regenerate:
            self._forget(use)

        # look again where a build may have been interrupted before its entries came into the database
        missing = self._missing()
        lacking = any(map(np.any, missing.values()))
        if lacking and not (self.writable or self.remote) and self.database == self.folder.database:
            self._merge()
            missing = self._missing()

        # say what is missing, and why
        incomplete = [manifest for manifest in self.manifests if missing[manifest.request.name].any()]
        if incomplete and self.writable:
            references.mark_complete(self.folder, self.use, complete=False)
        for manifest in incomplete:
            self._say_why(manifest)
        return self.database, missing

    def _missing(self) -> dict[str, np.ndarray]:
        metadata = Metadata(self.database)
        if not (self.section.skip_check or self.remote):
            self._check_segments(metadata)
        return {manifest.request.name: manifest.manifest.missing(metadata.has_many) for manifest in self.manifests}

    def _known(self) -> Reference | None:
        return next((use for use in references.all_references(self.folder) if use.id == self.use), None)

    def _announce(self, use: Reference | None) -> None:
        """Say what is wanted, before looking at what is there: a clean-up between the two keeps it."""
        if use is None:
            self._write_use(self.facts)
        else:
            references.touch(self.folder, self.use)

    def _write_use(self, facts: Mapping[str, Any]) -> None:
        references.write(
            self.folder,
            self.use,
            facts,
            {manifest.request.name: manifest.manifest.references for manifest in self.manifests},
        )

    def _merge(self) -> int:
        """Bring the database up to date; where the cache cannot be written, a copy of it."""
        target = None
        if not self.writable:
            name = hashlib.blake2b(str(self.folder.path.resolve()).encode(), digest_size=8).hexdigest()
            target = user_cache() / "metadata" / name / "metadata.db"
            target.parent.mkdir(parents=True, exist_ok=True)
        merged = merge(self.folder, target)
        if merged.rebuilt:
            log.warning("%s is rebuilt from the segments: %s", self.folder.database, merged.rebuilt)
        for note in merged.notes:
            log.warning("%s: %s", self.folder.path, note)
        self.database = merged.path
        return merged.entries

    def _forget(self, use: Reference | None) -> None:
        """Let all wanted entries count no longer; once, if a build that began with it was interrupted."""
        if not self.writable:
            what = f"{self.name} cannot be written to, so nothing in it can be encoded again"
            raise ConfigFault(
                [
                    Fault(
                        option("cache.regenerate", True),
                        what,
                        f"leave it out, or name another {option('data.cache_dir')}",
                    )
                ]
            )
        if use is not None and not use.complete and use.facts.get(REGENERATING):
            log.info(f"{option('cache.regenerate', True)}: the interrupted build continues")
            return
        metadata, count = Metadata(self.database), 0
        for manifest in self.manifests:
            for start in range(0, manifest.manifest.count, _CHUNK):
                rows = metadata.rows(np.array(manifest.manifest.addresses[start : start + _CHUNK]))
                places = [(row.segment, row.offset) for row in rows if row is not None]
                references.add(self.folder, places)
                count += len(places)
        self._write_use({**self.facts, REGENERATING: True})
        log.info(f"{option('cache.regenerate', True)}: %s entries are encoded again", f"{count:,}")
        self._merge()

    def _check_segments(self, metadata: Metadata) -> None:
        """Refuse to train from segments that are gone or too short, where this run wants something of them."""
        bad: dict[str, str] = {}
        ends: dict[str, int] = {}
        for segment in metadata.segments():
            try:
                size = self.folder.file(segment.name, BIN).stat().st_size
            except OSError as error:
                bad[segment.name], ends[segment.name] = f"cannot be read ({error.strerror})", 0
                continue
            if size < segment.end:
                bad[segment.name], ends[segment.name] = f"ends at {size:,} of {segment.end:,} bytes", size
        if not bad:
            return

        # damage counts where an entry of this run lies in it
        hit = dict.fromkeys(bad, 0)
        for manifest in self.manifests:
            for row in metadata.rows(manifest.manifest.addresses):
                if row is not None and row.segment in hit and row.offset + row.length > ends[row.segment]:
                    hit[row.segment] += 1  # what was repaired has no row any more
        if any(hit.values()):
            named = "; ".join(
                f"{self.folder.file(name, BIN)} {bad[name]}" for name in list(filter(hit.get, hit))[:_DAMAGED_NAMED]
            )
            raise TrainingFault(
                f"{sum(hit.values()):,} entries that this run needs are damaged: {named}. "
                f"`difftrain cache repair {self.folder.path}` drops them, and the next build encodes them again"
            )

    def _say_why(self, encoder_manifest: EncoderManifest) -> None:
        """Say where entries of the same data are there from an encoder that was another one then."""
        if (use := self._of_another(encoder_manifest)) is not None:
            log.info(
                "cache of %s: it was built for the same data by an encoder with other weights or settings "
                "(fingerprint %s, now %s); those entries are kept and not used",
                encoder_manifest.request.name,
                use.facts["encoders"][encoder_manifest.request.name]["fingerprint"][:12],
                encoder_manifest.fingerprint[:12],
            )

    def _of_another(self, encoder_manifest: EncoderManifest) -> Reference | None:
        """Find who else wanted entries of the same data, by an encoder of this name that was another one."""
        here = self.facts
        for use in references.all_references(self.folder):
            then = use.facts.get("encoders", {}).get(encoder_manifest.request.name)
            dirs = here.get("dirs")
            same = (dirs and use.facts.get("dirs") == dirs) or use.facts.get("index", "") == here.get("index")
            if then is None or not same or use.id == self.use or then["storage"] != encoder_manifest.request.storage:
                continue
            if then["fingerprint"] != encoder_manifest.fingerprint:
                return use
        return None

    def _refuse_others(self) -> None:
        """Refuse to trust a cache that has these data by another encoder and nothing by this one. Raises ConfigFault."""
        rivals = [
            (manifest, use)
            for manifest in self.manifests
            if (use := self._of_another(manifest)) is not None and use.complete
        ]
        if not rivals:
            return
        if self.writable or not (self.remote or self.database.exists()):
            self._merge()
        metadata, faults = Metadata(self.database), []
        for rival, use in rivals:
            if rival.manifest.missing(metadata.has_many).all():
                name, now = rival.request.name, self.facts.get("model")
                then, model = use.facts["encoders"][name]["fingerprint"], use.facts.get("model")
                what = (
                    f"{self.name} has {name} of this data by another encoder (fingerprint {then[:12]}"
                    f"{f' of {model}' if model else ''}) and nothing by the one configured "
                    f"(fingerprint {rival.fingerprint[:12]}{f' of {now}' if now else ''})"
                )
                remedy = (
                    "name the model that it was built with, or leave this out to encode again and keep the old entries"
                )
                faults.append(Fault(option("cache.trust", True), what, remedy))
        if faults:
            raise ConfigFault(faults)

    def refuse_incomplete(self, missing: Mapping[str, np.ndarray]) -> None:
        """Say how many entries are missing where none can be added. Raises ConfigFault."""
        if self.writable:
            return
        counts = {name: int(np.count_nonzero(rows)) for name, rows in missing.items()}
        if any(counts.values()):
            total = {manifest.request.name: manifest.manifest.count for manifest in self.manifests}
            shortages = ", ".join(f"{count:,} of {total[name]:,} of {name}" for name, count in counts.items() if count)
            why = "is read only, on an object store" if self.remote else "cannot be written to"
            what = f"{self.name} {why}, and entries that this run needs are missing: {shortages}"
            remedy = f"build it where it can be written, with the same settings and {option('cache.only', True)}, or name another folder"
            raise ConfigFault([Fault(option("data.cache_dir"), what, remedy)])

    # --- while it is built ---

    def writer(self, encoder_manifest: EncoderManifest) -> SegmentWriter:
        """Return what writes segments of an encoder's entries."""
        header = {
            "encoder": encoder_manifest.request.name,
            "fingerprint": encoder_manifest.fingerprint,
            "features": dict(encoder_manifest.request.dtypes),
            "storage": encoder_manifest.request.storage,
        }
        return SegmentWriter(self.folder, header, segment_bytes=max(1, int(self.section.segment_gib * GIB)))

    def finish(self, missing: Mapping[str, np.ndarray], passed: set[bytes]) -> int:
        """Make what was written count, and make sure that it is all there; return how many entries there are.

        passed: addresses that could not be encoded now. Raises TrainingFault.
        """
        count = self._merge()
        metadata = Metadata(self.database)
        for manifest in self.manifests:
            lacking = 0
            for start in range(0, manifest.manifest.count, _CHUNK):
                chunk = missing[manifest.request.name][start : start + _CHUNK]
                made = np.array(manifest.manifest.addresses[start : start + _CHUNK])[chunk]
                absent = made[~metadata.has_many(made)]
                lacking += sum(address.tobytes() not in passed for address in absent)
            if lacking:
                raise TrainingFault(
                    f"{self.folder.path}: {lacking:,} entries of {manifest.request.name} were just encoded and are gone: "
                    "was the cache cleaned or repaired meanwhile? Start again"
                )
        if (use := self._known()) is not None and use.facts.get(REGENERATING):
            self._write_use(self.facts)  # it is over: the next --regenerate_cache is another wish
        if not passed:
            references.mark_complete(self.folder, self.use)
        return count

    # --- once it is whole ---

    def open(self, database: Path, count: int) -> Metadata:
        """Open the database with what another machine has just written; a network disk may show it late."""
        end = time.monotonic() + _VISIBLE_WITHIN_S
        while (metadata := Metadata(database)).count < count:
            if time.monotonic() > end:
                raise TrainingFault(
                    f"{database}: after {_VISIBLE_WITHIN_S:.0f} s this machine still sees {metadata.count:,} entries, not the "
                    f"{count:,} that were written; is the folder a copy?"
                )
            time.sleep(0.5)
        return metadata
