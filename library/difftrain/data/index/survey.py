"""What all records of a data set are, in numbers: counted for people who look at it, not for training.

Sizes are columns and stay numpy; captions and copies are read from the index's database in one pass each.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from difftrain.data.index.index import DATABASE, Index, connect
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.prepare import Data

TRAINED, HELD_OUT, SURPLUS, UNPLACED = range(4)  # parts of the records; surplus: placed, but no epoch uses them
COUNTED = 200_000  # captions whose words are counted
FREQUENT = 60  # words and tags that are kept
LONGEST_TAG = 60  # characters; what is longer between commas is a sentence
# a word, or two letters of a script that writes none apart
_WORD = re.compile(r"(?=([\u3040-\u30ff\u3400-\u9fff]{2}))|([^\W\d_\u3040-\u30ff\u3400-\u9fff][\w'’-]*[^\W_])")
_COMMON = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "for",
        "from",
        "has",
        "have",
        "he",
        "her",
        "his",
        "in",
        "into",
        "is",
        "it",
        "its",
        "of",
        "on",
        "or",
        "she",
        "that",
        "the",
        "their",
        "them",
        "there",
        "they",
        "this",
        "to",
        "was",
        "were",
        "which",
        "while",
        "who",
        "with",
    ]
)
LARGER = 1.0 + 1e-3  # a scale above this is an enlargement, not a rounded side
_REJECTS = """
SELECT files.source, CASE WHEN instr(reason, ':') THEN substr(reason, 1, instr(reason, ':') - 1) ELSE reason END AS kind,
       count(*) FROM rejects LEFT JOIN files ON files.id = rejects.file GROUP BY files.source, kind ORDER BY count(*) DESC
"""
_COPIES = """
SELECT content, row FROM records WHERE content IN
    (SELECT content FROM records WHERE content IS NOT NULL GROUP BY content HAVING count(*) > 1)
ORDER BY content, row
"""


@dataclass(frozen=True)
class Placements:
    """How every record is placed, one entry an id.

    part: TRAINED, HELD_OUT, SURPLUS or UNPLACED. scale: resized width over that of the picture, above 1 where it is
    enlarged; kept: share of the resized picture that the cut leaves; both 0 where nothing fits. repeats: uses in an epoch.
    """

    part: np.ndarray
    scale: np.ndarray
    kept: np.ndarray
    repeats: np.ndarray
    source: np.ndarray


def placements(data: Data) -> Placements:
    """Place every record as training does: the part and bucket of the planning tables, the fit of the recipes."""
    columns = data.index.columns()
    source = np.asarray(columns.source)
    part, repeats = _parts(data)
    scale, kept = np.zeros(len(source), np.float32), np.zeros(len(source), np.float32)
    tables: dict[BucketTable, list[int]] = {}
    for ordinal, recipe in enumerate(data.recipes):
        tables.setdefault(recipe.buckets, []).append(ordinal)
    for table, ordinals in tables.items():
        own = np.flatnonzero(np.isin(source, ordinals) & (part != UNPLACED))
        scale[own], kept[own] = _fits(table, np.asarray(columns.width)[own], np.asarray(columns.height)[own])
    return Placements(part, scale, kept, repeats, source)


def _parts(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Read part and repeats of every record off the planning tables."""
    tables = data.tables
    ids = tables.ids()
    part, repeats = np.full(tables.count, SURPLUS, np.int8), np.zeros(tables.count, np.float64)
    part[ids[tables.count - tables.unplaced :]] = UNPLACED
    for rows in tables.validation:
        part[ids[rows.first : rows.first + rows.records]] = HELD_OUT
    for rows in tables.training:
        part[ids[rows.first : rows.first + rows.records]] = TRAINED
        for segment in rows.segments:
            own = ids[int(segment["first"]) : int(segment["first"] + segment["records"])]
            repeats[own] = segment["repeats"] + segment["extra"] / segment["of"]
    return part, repeats


def _fits(table: BucketTable, width: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and kept share; each distinct size is fitted once."""
    distinct, position = np.unique(
        width.astype(np.uint64) << np.uint64(32) | height.astype(np.uint64), return_inverse=True
    )
    facts = np.empty((len(distinct), 2), np.float32)
    for number, size in enumerate(distinct.tolist()):
        wide, high = size >> 32, size & 0xFFFFFFFF
        bucket = table.select((wide, high))
        area = bucket.resized_wh[0] * bucket.resized_wh[1]
        facts[number] = bucket.resized_wh[0] / wide, bucket.bucket.width * bucket.bucket.height / area
    return facts[position, 0], facts[position, 1]


@dataclass
class CaptionSurvey:
    """What the captions are, before anything is drawn.

    longest, shortest: (characters, id, caption), at most `most`. words, tags (what stands between commas): with the
    captions that have them, the most frequent first; counted: in so many captions.
    """

    count: int = 0
    empty: int = 0
    several: int = 0  # records with more than one
    longest: list[tuple[int, int, str]] = field(default_factory=list)
    shortest: list[tuple[int, int, str]] = field(default_factory=list)
    words: list[tuple[str, int]] = field(default_factory=list)
    tags: list[tuple[str, int]] = field(default_factory=list)
    counted: int = 0


def survey_captions(index: Index, most: int = 10) -> CaptionSurvey:
    """Read every caption once."""
    made = CaptionSurvey()
    longest: list[tuple[int, int, str]] = []
    shortest: list[tuple[int, int, str]] = []  # negative lengths: a heap drops its smallest
    words: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for row, texts in _captions(index):
        made.several += len(texts) > 1
        for text in texts:
            made.count += 1
            made.empty += not text
            _keep(longest, (len(text), -row, text), most)
            if text:
                _keep(shortest, (-len(text), -row, text), most)
            if made.counted < COUNTED:
                made.counted += 1
                words.update(words_of(text))
                tags.update(tags_of(text))
    made.words, made.tags = _most_frequent(words), _most_frequent(tags)
    ids = _ids_of(index, [-row for _, row, _ in (*longest, *shortest)])
    made.longest = [(size, ids[-row], text) for size, row, text in sorted(longest, reverse=True)]
    made.shortest = [(-size, ids[-row], text) for size, row, text in sorted(shortest, reverse=True)]
    return made


def words_of(caption: str) -> set[str]:
    """Return the words of a caption in lower case, without those that every text has."""
    return {pair or word for pair, word in _WORD.findall(caption.lower())} - _COMMON


def tags_of(caption: str) -> set[str]:
    """Return what stands between commas, as it is written; nothing of a caption without one."""
    parts = caption.split(",")
    return {tag for part in parts if 0 < len(tag := part.strip()) <= LONGEST_TAG} if len(parts) > 1 else set()


def _most_frequent(counts: Counter[str]) -> list[tuple[str, int]]:
    """Return the most frequent, those of equal number by name."""
    return heapq.nsmallest(FREQUENT, counts.items(), key=lambda item: (-item[1], item[0]))


def _captions(index: Index) -> Iterator[tuple[int, list[str]]]:
    database = connect(index.folder / DATABASE)
    for row, texts in database.execute("SELECT row, captions FROM records ORDER BY row"):
        yield row, json.loads(texts)
    database.close()


def _keep(heap: list[tuple[int, int, str]], item: tuple[int, int, str], most: int) -> None:
    if len(heap) < most:
        heapq.heappush(heap, item)
    elif item > heap[0]:
        heapq.heapreplace(heap, item)


def _ids_of(index: Index, rows: list[int]) -> dict[int, int]:
    """Find the ids of rows of the database."""
    column = np.asarray(index.columns().row)
    ids = np.flatnonzero(np.isin(column, rows))
    return dict(zip(column[ids].tolist(), ids.tolist(), strict=True))


def copies(index: Index, most: int = 100) -> tuple[int, list[list[int]]]:
    """Return how many groups of records have the same bytes, and the ids of the first groups, the largest first.

    One file that several sources use is no copy of itself.
    """
    database = connect(index.folder / DATABASE)
    groups: dict[bytes, list[int]] = {}
    for content, row in database.execute(_COPIES):
        groups.setdefault(content, []).append(row)
    database.close()
    ids = _ids_of(index, [row for rows in groups.values() for row in rows])
    copies = [sorted(ids[row] for row in rows) for rows in groups.values()]
    several = {info.root for info in index.sources}
    if len(several) < len(index.sources):  # some folder is read more than once
        copies = [group for group in copies if len({index.path(index.record(i)) for i in group}) > 1]
    copies.sort(key=lambda group: (-len(group), group))
    return len(copies), copies[:most]


def rejects_by_source(index: Index) -> dict[int | None, dict[str, int]]:
    """Count what was refused, by source and kind of reason; None: what was refused before any file was opened."""
    database = connect(index.folder / DATABASE)
    rejects: dict[int | None, dict[str, int]] = {}
    for source, kind, count in database.execute(_REJECTS):
        rejects.setdefault(source, {})[kind] = count
    database.close()
    return rejects


def folder_of(index: Index, source: int) -> str:
    """Return the folder or file that a source stands for."""
    info = index.sources[source]
    return str(PurePosixPath(info.root) / (info.only or info.prefix)).rstrip("/")
