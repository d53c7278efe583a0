"""The figures of docs/steps_epochs_repeats_buckets.md are those that the code computes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from difftrain.config import DataSection
from difftrain.data.plan.buckets import BucketTable

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "steps_epochs_repeats_buckets.md").read_text(encoding="utf-8")


def pair(text: str) -> tuple[int, int]:
    return tuple(int(number) for number in text.split(" x "))  # type: ignore[return-value]


def test_bucket_table() -> None:
    sizes = DataSection(resolution=(1024, 1024), enable_bucket=True, min_bucket_reso=512, max_bucket_reso=2048)
    table = BucketTable.of(sizes)
    rows = re.findall(r"^\| (\d+ x \d+) \| ([\d.]+) \| (\d+ x \d+) \| (\d+ x \d+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for picture, ratio, bucket, resized, cut in rows:
        width, height = pair(picture)
        fit = table.select((width, height))
        assert round(width / height, 2) == float(ratio)
        assert (fit.bucket.width, fit.bucket.height) == pair(bucket) and fit.resized_wh == pair(resized)
        lost = fit.resized_wh[0] - fit.bucket.width, fit.resized_wh[1] - fit.bucket.height
        assert cut == (f"{lost[0]} px of the width" if lost[0] else "nothing") and lost[1] == 0


def test_steps_of_small_buckets() -> None:
    rows = re.findall(r"^\| \d+ x \d+ \| (\d+) \| (\d+)[^|]* \| (\d+(?:, \d+)+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for uses, micro_batches, steps in rows:
        n = int(uses)
        assert int(micro_batches) == -(-n // 8)
        assert [int(s) for s in steps.split(", ")] == [(e + 1) * n // 8 - e * n // 8 for e in range(4)]
    assert sum(int(uses) for uses, _, _ in rows) == 10 * 30 + 200 == 500
    served = [e + 1 for e in range(40) if (e + 1) * 10 // 64 > e * 10 // 64]
    assert {b - a for a, b in itertools.pairwise(served)} == {6, 7}  # "every sixth or seventh epoch"
