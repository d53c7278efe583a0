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

from difftrain.config.sections import CacheSection
from difftrain.config.user_cache import user_cache
from difftrain.contracts import ConfigFault, Fault, TrainingFault
from difftrain.data.cache import drops, uses
from difftrain.data.cache.folder import BIN, CacheFolder
from difftrain.data.cache.merging import merge
from difftrain.data.cache.metadata import Metadata
from difftrain.data.cache.uses import Use
from difftrain.data.cache.wanted import Wanted
from difftrain.data.cache.writer import SegmentWriter
from difftrain.train.cache_plan import Wish

log = logging.getLogger("difftrain")
Say = Callable[[str], None]
GIB = 1 << 30
REGENERATING = "regenerating"
_SHOWN_S = 120.0  # within which a machine must see what another one has written
_DAMAGED_NAMED = 5
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Listed:
    """One encoder whose features are wanted: its fingerprint, and the list of all its entries."""

    wish: Wish
    fingerprint: str
    wanted: Wanted


class Disk:
    """A cache folder and what a run wants of it. Its methods are each for one process of those that build together."""

    def __init__(
        self,
        folder: CacheFolder,
        section: CacheSection,
        listed: Sequence[Listed],
        facts: Mapping[str, Any],
        url: str = "",
    ) -> None:
        """Take what is wanted. facts: what the use says of its configuration. url: of what the folder is a copy of."""
        self.folder, self.section, self.listed = folder, section, listed
        self.name, self.remote = url or str(folder.path), bool(url)
        self.writable = not url and folder.writable
        told = {each.wish.name: {"fingerprint": each.fingerprint, "storage": each.wish.storage} for each in listed}
        self.facts = {**facts, "encoders": told}
        state = [told, *(each.wanted.folder.name for each in listed), facts.get("index")]
        self.use = hashlib.blake2b(json.dumps(state).encode(), digest_size=12).hexdigest()
        self.database = folder.database

    # --- before anything is encoded ---

    def look(self) -> tuple[Path, dict[str, np.ndarray]]:
        """Find out what is missing, (N,) bool of each encoder; return it with the database that says so.

        Raises: TrainingFault where segments are damaged, DataFault for another format, ConfigFault where what is
        trusted is of other encoders.
        """
        use = self._known()
        if self.section.trust and use is not None and use.whole and self.database.exists():
            log.info("--trust_cache: everything was there when this cache was built; it is not looked through")
            uses.touch(self.folder, self.use)
            return self.database, {each.wish.name: np.zeros(each.wanted.count, bool) for each in self.listed}
        if self.section.trust and use is None:
            self._refuse_others()
        if self.writable:
            self._announce(use)
        if self.writable or not (self.remote or self.database.exists()):
            self._merge()
        if self.section.regenerate:
            self._forget(use)
        found = self._missing()
        lacking = any(map(np.any, found.values()))
        if lacking and not (self.writable or self.remote) and self.database == self.folder.database:
            self._merge()  # a build may have been interrupted before its entries came into the database
            found = self._missing()
        incomplete = [each for each in self.listed if found[each.wish.name].any()]
        if incomplete and self.writable:
            uses.mark_whole(self.folder, self.use, whole=False)
        for each in incomplete:
            self._say_why(each)
        return self.database, found

    def _missing(self) -> dict[str, np.ndarray]:
        metadata = Metadata(self.database)
        if not (self.section.skip_check or self.remote):
            self._check_segments(metadata)
        return {each.wish.name: each.wanted.missing(metadata.has_many) for each in self.listed}

    def _known(self) -> Use | None:
        return next((use for use in uses.all_uses(self.folder) if use.id == self.use), None)

    def _announce(self, use: Use | None) -> None:
        """Say what is wanted, before looking at what is there: a clean-up between the two keeps it."""
        if use is None:
            self._write_use(self.facts)
        else:
            uses.touch(self.folder, self.use)

    def _write_use(self, facts: Mapping[str, Any]) -> None:
        uses.write(self.folder, self.use, facts, {each.wish.name: each.wanted.uses for each in self.listed})

    def _merge(self) -> int:
        """Bring the database up to date; where the cache cannot be written, a copy of it."""
        target = None
        if not self.writable:
            name = hashlib.blake2b(str(self.folder.path.resolve()).encode(), digest_size=8).hexdigest()
            target = user_cache() / "metadata" / name / "metadata.db"
            target.parent.mkdir(parents=True, exist_ok=True)
        merged = merge(self.folder, target)
        if merged.rebuilt:
            log.warning("%s is built again from the segments: %s", self.folder.database, merged.rebuilt)
        for note in merged.notes:
            log.warning("%s: %s", self.folder.path, note)
        self.database = merged.path
        return merged.entries

    def _forget(self, use: Use | None) -> None:
        """Let all wanted entries count no longer; once, if a build that began with it was interrupted."""
        if not self.writable:
            what = f"{self.name} cannot be written to, so nothing in it can be encoded anew"
            raise ConfigFault([Fault("--regenerate_cache", what, "leave it out, or name another --cache_dir")])
        if use is not None and not use.whole and use.facts.get(REGENERATING):
            log.info("--regenerate_cache: the build that was interrupted goes on")
            return
        metadata, count = Metadata(self.database), 0
        for each in self.listed:
            for start in range(0, each.wanted.count, _CHUNK):
                rows = metadata.rows(np.array(each.wanted.addresses[start : start + _CHUNK]))
                places = [(row.segment, row.offset) for row in rows if row is not None]
                drops.add(self.folder, places)
                count += len(places)
        self._write_use({**self.facts, REGENERATING: True})
        log.info("--regenerate_cache: %s entries are encoded anew", f"{count:,}")
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
        hit = dict.fromkeys(bad, 0)
        for each in self.listed:
            for row in metadata.rows(each.wanted.addresses):
                if row is not None and row.segment in hit and row.offset + row.length > ends[row.segment]:
                    hit[row.segment] += 1  # what was repaired has no row any more
        if any(hit.values()):
            named = "; ".join(
                f"{self.folder.file(name, BIN)} {bad[name]}" for name in list(filter(hit.get, hit))[:_DAMAGED_NAMED]
            )
            raise TrainingFault(
                f"{sum(hit.values()):,} entries that this run wants are damaged: {named}. "
                f"`difftrain cache repair {self.folder.path}` lets them count no longer, and the next build encodes them anew"
            )

    def _say_why(self, each: Listed) -> None:
        """Say where entries of the same data are there from an encoder that was another one then."""
        if (use := self._of_another(each)) is not None:
            log.info(
                "cache of %s: it was built for the same data by an encoder with other weights or settings "
                "(fingerprint %s, now %s); entries of that one are left alone and not used",
                each.wish.name,
                use.facts["encoders"][each.wish.name]["fingerprint"][:12],
                each.fingerprint[:12],
            )

    def _of_another(self, each: Listed) -> Use | None:
        """Find who else wanted entries of the same data, by an encoder of this name that was another one."""
        here = self.facts
        for use in uses.all_uses(self.folder):
            then = use.facts.get("encoders", {}).get(each.wish.name)
            dirs = here.get("dirs")
            same = (dirs and use.facts.get("dirs") == dirs) or use.facts.get("index", "") == here.get("index")
            if then is None or not same or use.id == self.use or then["storage"] != each.wish.storage:
                continue
            if then["fingerprint"] != each.fingerprint:
                return use
        return None

    def _refuse_others(self) -> None:
        """Refuse to trust a cache that has these data by another encoder and nothing by this one. Raises ConfigFault."""
        others = [(each, use) for each in self.listed if (use := self._of_another(each)) is not None and use.whole]
        if not others:
            return
        if self.writable or not (self.remote or self.database.exists()):
            self._merge()
        metadata, faults = Metadata(self.database), []
        for each, use in others:
            if each.wanted.missing(metadata.has_many).all():
                name, now = each.wish.name, self.facts.get("model")
                then, model = use.facts["encoders"][name]["fingerprint"], use.facts.get("model")
                what = (
                    f"{self.name} has {name} of these data by another encoder (fingerprint {then[:12]}"
                    f"{f' of {model}' if model else ''}) and nothing by the one that is asked for "
                    f"(fingerprint {each.fingerprint[:12]}{f' of {now}' if now else ''})"
                )
                remedy = (
                    "name the model that it was built with, or leave this out to encode anew beside the old entries"
                )
                faults.append(Fault("--trust_cache", what, remedy))
        if faults:
            raise ConfigFault(faults)

    def refuse_incomplete(self, missing: Mapping[str, np.ndarray]) -> None:
        """Say how many entries are missing where none can be added. Raises ConfigFault."""
        if self.writable:
            return
        counts = {name: int(np.count_nonzero(each)) for name, each in missing.items()}
        if any(counts.values()):
            total = {each.wish.name: each.wanted.count for each in self.listed}
            told = ", ".join(f"{count:,} of {total[name]:,} of {name}" for name, count in counts.items() if count)
            why = "is read only, on an object store" if self.remote else "cannot be written to"
            what = f"{self.name} {why}, and entries that this run wants are missing: {told}"
            remedy = "build it where it can be written, with the same settings and --cache_only, or name another folder"
            raise ConfigFault([Fault("--cache_dir", what, remedy)])

    # --- while it is built ---

    def writer(self, each: Listed) -> SegmentWriter:
        """Return what writes segments of an encoder's entries."""
        header = {
            "encoder": each.wish.name,
            "fingerprint": each.fingerprint,
            "features": dict(each.wish.dtypes),
            "storage": each.wish.storage,
        }
        return SegmentWriter(self.folder, header, segment_bytes=max(1, int(self.section.segment_gib * GIB)))

    def finish(self, missing: Mapping[str, np.ndarray], passed: set[bytes]) -> int:
        """Make what was written count, and make sure that it is all there; return how many entries there are.

        passed: addresses that could not be encoded now. Raises TrainingFault.
        """
        count = self._merge()
        metadata = Metadata(self.database)
        for each in self.listed:
            lacking = 0
            for start in range(0, each.wanted.count, _CHUNK):
                mine = missing[each.wish.name][start : start + _CHUNK]
                made = np.array(each.wanted.addresses[start : start + _CHUNK])[mine]
                absent = made[~metadata.has_many(made)]
                lacking += sum(address.tobytes() not in passed for address in absent)
            if lacking:
                raise TrainingFault(
                    f"{self.folder.path}: {lacking:,} entries of {each.wish.name} were just encoded and do not "
                    "count: was the cache cleaned or repaired meanwhile? Start again"
                )
        if (use := self._known()) is not None and use.facts.get(REGENERATING):
            self._write_use(self.facts)  # it is over: the next --regenerate_cache is another wish
        if not passed:
            uses.mark_whole(self.folder, self.use)
        return count

    # --- once it is whole ---

    def open(self, database: Path, count: int) -> Metadata:
        """Open the database with what another machine has just written; a network disk may show it late."""
        end = time.monotonic() + _SHOWN_S
        while (metadata := Metadata(database)).count < count:
            if time.monotonic() > end:
                raise TrainingFault(
                    f"{database}: after {_SHOWN_S:.0f} s this machine still sees {metadata.count:,} entries, not the "
                    f"{count:,} that were written; is the folder a copy?"
                )
            time.sleep(0.5)
        return metadata
