"""Three hundred images of strangers: the good ones are used with the pixels that Pillow gives, every other one is named."""

from __future__ import annotations

import hostile_images
import pytest

pytestmark = pytest.mark.workers


def test_every_image_is_used_or_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTILE_RAN", "")
    counts = hostile_images.try_images("", verbose=False)
    assert sum(counts.values()) >= 300 and counts["refused"] > 100 and counts["used"] > 100
    assert (
        not counts.keys() - {"refused", "used", "no end", "CODE RAN"} and not counts["no end"] + counts["CODE RAN"]
    ), capfd.readouterr().out


@pytest.mark.nightly
def test_they_are_the_same_every_time() -> None:
    assert hostile_images.images() == hostile_images.images()
