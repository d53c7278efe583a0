"""Where a run keeps its features: a cache folder, or this machine's memory; and which machines share it."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from difftrain.cache.disk import DiskCache, EncoderManifest, Log
from difftrain.cache.remote import RemoteCache, fetch_cache
from difftrain.cache.request import StorageEstimate, disk_shortage, memory_shortage
from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.memory import MemoryEntries, MemorySink, Verified, preload
from difftrain.cache.store.read import Reader
from difftrain.cache.store.segment import EntrySink, SegmentFiles, SegmentWriter
from difftrain.config.paths import is_url, shown_url
from difftrain.config.schema.sections import CacheSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Fault
from difftrain.device import host
from difftrain.distributed.collective import on_each_machine, run_on

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks


_PROBE_S = 3.0  # for a file that another machine has just made


@dataclass(frozen=True)
class BuildGroup:
    """Ranks that build one cache. leader: does what one process does. leaders: those of all groups of the job."""

    leader: int
    members: tuple[int, ...]
    leaders: tuple[int, ...]


def machine_groups(ranks: Ranks) -> BuildGroup:
    """Return the ranks of this machine: they share its memory, if nothing else. Every rank calls it."""
    return _group(ranks, {machine: machine for machine in _machines(ranks)})


def folder_groups(ranks: Ranks, folder: Path) -> BuildGroup:
    """Find out which machines see each other's files in a folder, and return this rank's group. Every rank calls it.

    A folder that cannot be written to is each machine's own: nothing is built there.
    """
    machines = _machines(ranks)
    token = ranks.broadcast(uuid.uuid4().hex)
    if len(set(machines)) == 1:
        return machine_groups(ranks)

    def probe(machine: int) -> Path:
        return folder / f"probe-{token}-{machine}"

    def leave() -> None:
        with contextlib.suppress(OSError):
            probe(ranks.rank).touch()

    run_on(ranks, ranks.leads_node, leave)
    try:
        # whose probe a machine sees shares its folder with it
        seen = ranks.gather(_seen(machines, probe) if ranks.leads_node else frozenset())
    finally:
        if ranks.leads_node:
            with contextlib.suppress(OSError):
                probe(ranks.rank).unlink()
    home = {}
    for own_machine in set(machines):
        # seen from both sides: a mount that one of them lost does not count as shared
        home[own_machine] = min(
            neighbour
            for neighbour in {own_machine, *seen[own_machine]}
            if neighbour == own_machine or own_machine in seen[neighbour]
        )
    return _group(ranks, home)


def _seen(machines: list[int], probe: Callable[[int], Path]) -> frozenset[int]:
    """Look for the files of all machines; a network disk may show them late."""
    end = time.monotonic() + _PROBE_S
    while True:
        visible = frozenset(machine for machine in machines if probe(machine).exists())
        if len(visible) == len(set(machines)) or time.monotonic() > end:
            return visible
        time.sleep(0.1)


def _machines(ranks: Ranks) -> list[int]:
    """Return the first rank of each rank's machine."""
    return ranks.gather(ranks.rank - ranks.local_rank)


def _group(ranks: Ranks, home: dict[int, int]) -> BuildGroup:
    """Put together the ranks whose machines have one home."""
    homes = [home[machine] for machine in _machines(ranks)]
    leader = homes[ranks.rank]
    members = tuple(rank for rank, home in enumerate(homes) if home == leader)
    return BuildGroup(leader, members, tuple(sorted(set(homes))))


log = logging.getLogger("difftrain")


class CacheLocation(Protocol):
    """Keep the features of some encoders. missing: of each encoder's entries, (N,) bool, the same on a whole group.

    passed: addresses of what could not be read now, and why, of all ranks of the group once it is finished.
    """

    manifests: Sequence[EncoderManifest]
    group: BuildGroup
    missing: dict[str, np.ndarray]
    passed: dict[bytes, str]

    def shortage(self, estimates: Sequence[StorageEstimate], log: Log) -> Iterator[Fault]: ...
    def sink(self, encoder_manifest: EncoderManifest) -> EntrySink: ...
    def finish(self) -> None: ...
    def rejects(self) -> list[bytes]: ...
    def reader(self, encoder_manifest: EncoderManifest) -> Reader: ...


class DiskLocation:
    """A cache folder that other runs use too; or an object store, of which a copy of what is small lies here."""

    def __init__(
        self,
        where: str,
        section: CacheSection,
        ranks: Ranks,
        manifests: Sequence[EncoderManifest],
        facts: Mapping[str, Any],
    ) -> None:
        """Open it, and find out what is missing. Raises as DiskCache.look does, ConfigFault where nothing may be added."""
        self.manifests, self._ranks, self._section = manifests, ranks, section
        self.passed: dict[bytes, str] = {}
        self._remote: RemoteCache | None = None
        if is_url(where):
            self._remote = on_each_machine(ranks, lambda: fetch_cache(where, section.copy_gib, log.info))
            self.folder, self.group = CacheFolder.open(self._remote.folder), machine_groups(ranks)
        else:
            run_on(ranks, ranks.leads_node, lambda: bool(CacheFolder.open(where, create=True)))
            self.folder = CacheFolder.open(where)
            self.group = folder_groups(ranks, self.folder.path)

        # one process a group looks, and tells the others what is missing
        self._disk = DiskCache(self.folder, section, manifests, facts, shown_url(where) if self._remote else "")
        seen: list[tuple[Path, dict[str, np.ndarray]]] = []
        run_on(ranks, self._leads, lambda: seen.append(self._looked()))
        shared = _from_leader(ranks, self.group, _packed(*seen[0]) if seen else None)
        self._database, self.missing = _unpacked(shared)
        self._count = 0
        self._entries: Any = None
        self._source: Any = None
        self._verified: Verified | None = None

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == self.group.leader

    @property
    def _incomplete(self) -> bool:
        return any(bool(rows.any()) for rows in self.missing.values())

    def _looked(self) -> tuple[Path, dict[str, np.ndarray]]:
        database, missing = self._disk.look()
        self._disk.refuse_incomplete(missing)
        return database, missing

    def shortage(self, estimates: Sequence[StorageEstimate], log: Log) -> Iterator[Fault]:
        """Compare what is free with what is missing."""
        yield from disk_shortage(estimates, self.folder.path, log) if self._leads else ()

    def sink(self, encoder_manifest: EncoderManifest) -> SegmentWriter:
        """Return what writes segments of this rank's own."""
        return self._disk.writer(encoder_manifest)

    def finish(self) -> None:
        """Let what was written count, and open it."""
        self.passed = _union(self._ranks, self.group, self.passed)
        counts: list[int] = []
        if self._ranks.any(self._incomplete):
            build = self._leads and self._incomplete
            run_on(self._ranks, build, lambda: counts.append(self._disk.finish(self.missing, set(self.passed))))
            self._count = _from_leader(self._ranks, self.group, counts[0] if counts else 0)

        # open what is there now: on every machine, or in its memory
        metadata = self._disk.open(self._database, self._count)
        self._metadata = metadata
        self._source = self._remote.segments if self._remote else SegmentFiles(self.folder)
        self._entries = metadata
        if self._section.preload and not self._section.only:
            addresses = np.concatenate([np.asarray(manifest.manifest.addresses) for manifest in self.manifests])
            where = on_each_machine(
                self._ranks,
                lambda: preload(metadata, self._source, addresses, host.available_bytes(), self._disk.name),
            )
            self._entries, self._source = MemoryEntries(where), SegmentFiles(None)
            log.info(
                f"{option('cache.preload', True)}: %s entries of the cache are in memory, one copy for all processes of this machine",
                f"{self._entries.count:,}",
            )
        elif not self._section.skip_check:
            shared = on_each_machine(self._ranks, lambda: (Verified.reserve(metadata.count), metadata.generation))
            self._verified = Verified(*shared)

    def rejects(self) -> list[bytes]:
        """Return the addresses of all that nothing could be made of."""
        return self._metadata.rejects()

    def reader(self, encoder_manifest: EncoderManifest) -> Reader:
        """Return what reads an encoder's entries."""
        features = encoder_manifest.request.encoder.features
        return Reader(self._source, self._entries, features, self._verified, cache=self._disk.name)


class MemoryLocation:
    """Memory that the processes of this machine share; it is gone with them."""

    def __init__(self, ranks: Ranks, manifests: Sequence[EncoderManifest]) -> None:
        """Begin with nothing."""
        self.manifests, self._ranks = manifests, ranks
        self.group = machine_groups(ranks)
        self.missing = {manifest.request.name: np.ones(manifest.manifest.count, bool) for manifest in manifests}
        self.passed: dict[bytes, str] = {}
        self._sink = MemorySink()

    def shortage(self, estimates: Sequence[StorageEstimate], log: Log) -> Iterator[Fault]:
        """Compare what is free with what is wanted."""
        yield from memory_shortage(estimates, log) if self._ranks.leads_node else ()

    def sink(self, encoder_manifest: EncoderManifest) -> MemorySink:
        """Return this rank's blocks of memory."""
        return self._sink

    def finish(self) -> None:
        """Put together what all ranks of this machine hold."""
        self.passed = _union(self._ranks, self.group, self.passed)
        rows = self._ranks.gather(self._sink.rows())
        own = [rows[rank] for rank in self.group.members]
        self._entries = MemoryEntries(on_each_machine(self._ranks, lambda: MemoryEntries.reserve(own)))

    def rejects(self) -> list[bytes]:
        """Return the addresses of all that nothing could be made of."""
        return self._entries.rejects()

    def reader(self, encoder_manifest: EncoderManifest) -> Reader:
        """Return what reads an encoder's entries."""
        return Reader(
            SegmentFiles(None),
            self._entries,
            encoder_manifest.request.encoder.features,
            None,
            cache="the cache in memory",
        )


def _from_leader(ranks: Ranks, group: BuildGroup, value: Any) -> Any:
    """Return what the leader of this rank's group gave."""
    shared_store = None
    for leader in group.leaders:
        shared = ranks.broadcast(value if ranks.rank == leader else None, source=leader)
        if leader == group.leader:
            shared_store = shared
    return shared_store


def _union(ranks: Ranks, group: BuildGroup, own: dict[bytes, str]) -> dict[bytes, str]:
    shares = ranks.gather(own)
    return {address: why for rank in group.members for address, why in shares[rank].items()}


def _packed(database: Path, missing: Mapping[str, np.ndarray]) -> tuple[str, dict[str, tuple[int, bytes]]]:
    return str(database), {
        name: (len(bits), zlib.compress(np.packbits(bits).tobytes(), 1)) for name, bits in missing.items()
    }


def _unpacked(shared: tuple[str, dict[str, tuple[int, bytes]]]) -> tuple[Path, dict[str, np.ndarray]]:
    database, missing = shared
    return Path(database), {
        name: np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8), count=count).astype(bool)
        for name, (count, bits) in missing.items()
    }
