"""Captions of draws, with kohya's meaning: dropout, shuffled tags, tags that stay in front.

Every choice is a counter-based draw, so a use of a record has the same caption on any rank, with any number of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from difftrain.contracts import Record

if TYPE_CHECKING:
    from difftrain.config import CaptionSection


class Draws(Protocol):
    """What is needed of a stream (diffusion.draws.Stream)."""

    def integer(self, high: int) -> int: ...
    def uniform(self) -> float: ...
    def permutation(self, n: int) -> list[int]: ...


def caption_of(record: Record, stream: Draws, section: CaptionSection, epoch: int) -> str:
    """Make the caption of one use of a record; "" where it is dropped.

    epoch: counted from 0. dropout_every_n_epochs=n drops every caption in the n-th, 2n-th, ... epoch.
    Of several captions one is drawn, each as likely as the others.
    """
    caption = record.captions[stream.integer(len(record.captions)) if len(record.captions) > 1 else 0]
    # Drawn whether or not it is needed: turning dropout on leaves the order of the tags as it was.
    lot = stream.uniform()
    every = section.dropout_every_n_epochs
    if lot < section.dropout_rate or (every and (epoch + 1) % every == 0):
        return ""
    if not section.shuffle and section.tag_dropout_rate <= 0:
        return caption
    tags = [tag.strip() for tag in caption.strip().split(section.separator)]
    kept, loose = tags[: section.keep_tokens], tags[section.keep_tokens :]
    if section.shuffle:
        loose = [loose[i] for i in stream.permutation(len(loose))]
    if section.tag_dropout_rate > 0:
        loose = [tag for tag in loose if stream.uniform() >= section.tag_dropout_rate]
    return ", ".join(kept + loose)
