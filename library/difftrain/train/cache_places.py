"""Where features are kept for a run: a cache on disk, or this machine's memory. Every rank holds one and calls along."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from difftrain.config.sections import CacheSection
from difftrain.config.stores import shown
from difftrain.config.there import is_url
from difftrain.contracts import Fault
from difftrain.data.cache.folder import CacheFolder
from difftrain.data.cache.memory import MemoryEntries, MemorySink, Verified
from difftrain.data.cache.preload import preload
from difftrain.data.cache.reader import Reader
from difftrain.data.cache.remote import RemoteCache, fetch_cache
from difftrain.data.cache.segments import Segments
from difftrain.data.cache.writer import SegmentWriter, Sink
from difftrain.device import host
from difftrain.train.cache_disk import Disk, Listed, Say
from difftrain.train.cache_groups import Group, folder_groups, machine_groups
from difftrain.train.cache_plan import Need, short_of_disk, short_of_memory
from difftrain.train.together import for_all, on_each_machine

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")


class Place(Protocol):
    """Keep the features of some encoders. missing: of each encoder's entries, (N,) bool, the same on a whole group.

    passed: addresses of what could not be read now, and why, of all ranks of the group once it is finished.
    """

    listed: Sequence[Listed]
    group: Group
    missing: dict[str, np.ndarray]
    passed: dict[bytes, str]

    def short(self, needs: Sequence[Need], say: Say) -> Iterator[Fault]: ...
    def sink(self, each: Listed) -> Sink: ...
    def finish(self) -> None: ...
    def rejects(self) -> list[bytes]: ...
    def reader(self, each: Listed) -> Reader: ...


class OnDisk:
    """A cache folder that other runs use too; or an object store, of which a copy of what is small lies here."""

    def __init__(
        self, where: str, section: CacheSection, ranks: Ranks, listed: Sequence[Listed], facts: Mapping[str, Any]
    ) -> None:
        """Open it, and find out what is missing. Raises as Disk.look does, ConfigFault where nothing may be added."""
        self.listed, self._ranks, self._section = listed, ranks, section
        self.passed: dict[bytes, str] = {}
        self._remote: RemoteCache | None = None
        if is_url(where):
            self._remote = on_each_machine(ranks, lambda: fetch_cache(where, section.copy_gib, log.info))
            self.folder, self.group = CacheFolder.open(self._remote.folder), machine_groups(ranks)
        else:
            for_all(ranks, ranks.leads_node, lambda: bool(CacheFolder.open(where, create=True)))
            self.folder = CacheFolder.open(where)
            self.group = folder_groups(ranks, self.folder.path)
        self._disk = Disk(self.folder, section, listed, facts, shown(where) if self._remote else "")
        seen: list[tuple[Path, dict[str, np.ndarray]]] = []
        for_all(ranks, self._leads, lambda: seen.append(self._looked()))
        told = _from_leader(ranks, self.group, _packed(*seen[0]) if seen else None)
        self._database, self.missing = _unpacked(told)
        self._count = 0
        self._entries: Any = None
        self._source: Any = None
        self._verified: Verified | None = None

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == self.group.leader

    @property
    def _incomplete(self) -> bool:
        return any(bool(each.any()) for each in self.missing.values())

    def _looked(self) -> tuple[Path, dict[str, np.ndarray]]:
        database, missing = self._disk.look()
        self._disk.refuse_incomplete(missing)
        return database, missing

    def short(self, needs: Sequence[Need], say: Say) -> Iterator[Fault]:
        """Compare what is free with what is missing."""
        yield from short_of_disk(needs, self.folder.path, say) if self._leads else ()

    def sink(self, each: Listed) -> SegmentWriter:
        """Return what writes segments of this rank's own."""
        return self._disk.writer(each)

    def finish(self) -> None:
        """Let what was written count, and open it."""
        self.passed = _union(self._ranks, self.group, self.passed)
        counts: list[int] = []
        if self._ranks.any(self._incomplete):
            build = self._leads and self._incomplete
            for_all(self._ranks, build, lambda: counts.append(self._disk.finish(self.missing, set(self.passed))))
            self._count = _from_leader(self._ranks, self.group, counts[0] if counts else 0)
        metadata = self._disk.open(self._database, self._count)
        self._metadata = metadata
        self._source = self._remote.segments if self._remote else Segments(self.folder)
        self._entries = metadata
        if self._section.preload and not self._section.only:
            addresses = np.concatenate([np.asarray(each.wanted.addresses) for each in self.listed])
            where = on_each_machine(
                self._ranks,
                lambda: preload(metadata, self._source, addresses, host.available_bytes(), self._disk.name),
            )
            self._entries, self._source = MemoryEntries(where), Segments(None)
            log.info(
                "--cache_preload: %s entries of the cache lie in memory, once for this machine",
                f"{self._entries.count:,}",
            )
        elif not self._section.skip_check:
            told = on_each_machine(self._ranks, lambda: (Verified.reserve(metadata.count), metadata.generation))
            self._verified = Verified(*told)

    def rejects(self) -> list[bytes]:
        """Return the addresses of all that nothing could be made of."""
        return self._metadata.rejects()

    def reader(self, each: Listed) -> Reader:
        """Return what reads an encoder's entries."""
        features = each.wish.encoder.features
        return Reader(self._source, self._entries, features, self._verified, cache=self._disk.name)


class InMemory:
    """Memory that the processes of this machine share; it is gone with them."""

    def __init__(self, ranks: Ranks, listed: Sequence[Listed]) -> None:
        """Begin with nothing."""
        self.listed, self._ranks = listed, ranks
        self.group = machine_groups(ranks)
        self.missing = {each.wish.name: np.ones(each.wanted.count, bool) for each in listed}
        self.passed: dict[bytes, str] = {}
        self._sink = MemorySink()

    def short(self, needs: Sequence[Need], say: Say) -> Iterator[Fault]:
        """Compare what is free with what is wanted."""
        yield from short_of_memory(needs, say) if self._ranks.leads_node else ()

    def sink(self, each: Listed) -> MemorySink:
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

    def reader(self, each: Listed) -> Reader:
        """Return what reads an encoder's entries."""
        return Reader(Segments(None), self._entries, each.wish.encoder.features, None, cache="the cache in memory")


def _from_leader(ranks: Ranks, group: Group, value: Any) -> Any:
    """Return what the leader of this rank's group gave."""
    found = None
    for leader in group.leaders:
        told = ranks.broadcast(value if ranks.rank == leader else None, source=leader)
        if leader == group.leader:
            found = told
    return found


def _union(ranks: Ranks, group: Group, own: dict[bytes, str]) -> dict[bytes, str]:
    shares = ranks.gather(own)
    return {address: why for rank in group.members for address, why in shares[rank].items()}


def _packed(database: Path, missing: Mapping[str, np.ndarray]) -> tuple[str, dict[str, tuple[int, bytes]]]:
    return str(database), {
        name: (len(bits), zlib.compress(np.packbits(bits).tobytes(), 1)) for name, bits in missing.items()
    }


def _unpacked(told: tuple[str, dict[str, tuple[int, bytes]]]) -> tuple[Path, dict[str, np.ndarray]]:
    database, missing = told
    return Path(database), {
        name: np.unpackbits(np.frombuffer(zlib.decompress(bits), np.uint8), count=count).astype(bool)
        for name, (count, bits) in missing.items()
    }
