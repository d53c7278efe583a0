"""How the demo looks at held-out records: timesteps spread evenly, captions that are really others."""

from __future__ import annotations

import torch

from difftrain.contracts import Batch, Bucket
from difftrain.demo import score


def batch(first: int, rows: list[int]) -> Batch:
    """Make a batch whose captions are the given numbers."""
    count = len(rows)
    return Batch(
        bucket=Bucket(64, 64),
        record_id=torch.arange(first, first + count),
        occurrence=torch.zeros(count, dtype=torch.int64),
        features={
            "input_ids_1": torch.tensor(rows).view(-1, 1, 1),
            "input_ids_2": torch.tensor(rows).view(-1, 1, 1) + 100,
        },
        draws={"noise": torch.zeros(count, 1), "timestep": torch.zeros(count, dtype=torch.int64)},
        counts={"samples": float(count)},
    )


def test_timesteps_cover_the_process_evenly() -> None:
    seen = torch.cat([score._at_round(batch(0, [0] * 200), n).draws["timestep"] for n in range(score.ROUNDS)])
    assert int(seen.min()) >= 0 and int(seen.max()) < 1000
    counts = torch.histc(seen.float(), 20, 0, 1000)
    assert counts.min() > 0.9 * len(seen) / 20 and counts.max() < 1.1 * len(seen) / 20


def test_rounds_look_elsewhere_and_repeat() -> None:
    one = batch(0, [0] * 50)
    first, again, second = (score._at_round(one, n).draws["timestep"] for n in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(one.draws["timestep"], torch.zeros(50, dtype=torch.int64))  # the batch itself is untouched


def test_wrong_captions_are_other_ones_of_both_encoders() -> None:
    batches = [batch(0, [1, 1, 1, 2]), batch(4, [1, 3])]
    swapped = list(score._with_wrong_captions(batches))
    before = torch.cat([b.features["input_ids_1"] for b in batches]).flatten()
    after = torch.cat([b.features["input_ids_1"] for b in swapped]).flatten()
    assert (before != after).all()
    second = torch.cat([b.features["input_ids_2"] for b in swapped]).flatten()
    assert torch.equal(second, after + 100)
    assert [len(b.record_id) for b in swapped] == [4, 2]


def test_one_caption_for_all_stays() -> None:
    assert next(iter(score._with_wrong_captions([batch(0, [7, 7])]))).features["input_ids_1"].flatten().tolist() == [
        7,
        7,
    ]
    assert list(score._with_wrong_captions([])) == []
