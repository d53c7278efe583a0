"""Captions of draws, with kohya's meaning: prefix and suffix, dropout, wildcards, shuffled tags, tags that stay.

Every choice is a counter-based draw, so a use of a record has the same caption on any rank, with any number of workers.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from difftrain.contracts import Record

if TYPE_CHECKING:
    from difftrain.config import CaptionSection

# "{{" and "}}" stand for the braces themselves; whatever else stands between two braces is a choice. The quantifier
# gives nothing back: the first two of "}}}" are the escape, as kohya reads them.
_WILDCARD = re.compile(r"\{\{|\}\}|\{((?:\}\}|[^}])++)\}")
_CLOSING = re.compile(r"\}+")


class CaptionDraws(Protocol):
    """What is needed of a stream (diffusion.draws.Stream)."""

    def integer(self, high: int) -> int: ...
    def uniform(self) -> float: ...
    def permutation(self, n: int) -> list[int]: ...


def caption_of(
    record: Record, stream: CaptionDraws, section: CaptionSection, epoch: int, step: int = 0, total_steps: int = 0
) -> str:
    """Make the caption of one use of a record; "" where it is dropped.

    epoch, step: counted from 0; step is the optimizer update that the use is part of, of total_steps.
    dropout_every_n_epochs=n drops every caption in the n-th, 2n-th, ... epoch.
    Of several captions one is drawn, each as likely as the others.
    """
    caption = _chosen(record, stream)
    return "" if _drops(stream, section, epoch) else _made(caption, stream, section, step, total_steps)


def varies(section: CaptionSection) -> bool:
    """Tell whether a caption comes in several forms, dropping it as a whole aside: variants of it can be cached."""
    return section.shuffle or section.enable_wildcard or section.tag_dropout_rate > 0 or section.shuffle_capitalization


def may_drop(section: CaptionSection) -> bool:
    """Tell whether any use of a caption is dropped as a whole."""
    return bool(section.dropout_rate or section.dropout_every_n_epochs)


def is_dropped(record: Record, stream: CaptionDraws, section: CaptionSection, epoch: int) -> bool:
    """Tell whether caption_of makes "" of this use."""
    _chosen(record, stream)
    return _drops(stream, section, epoch)


def variant_of(
    record: Record, stream: CaptionDraws, section: CaptionSection, step: int = 0, total_steps: int = 0
) -> str:
    """Make a caption as caption_of does, one that is never dropped. stream: of the record and the variant's number."""
    caption = _chosen(record, stream)
    stream.uniform()
    return _made(caption, stream, section, step, total_steps)


def written(record: Record, stream: CaptionDraws, section: CaptionSection) -> list[str]:
    """Make the caption of each one that is written for a record, where these do not vary."""
    return [variant_of(replace(record, captions=(caption,)), stream, section) for caption in record.captions]


def _chosen(record: Record, stream: CaptionDraws) -> str:
    return record.captions[stream.integer(len(record.captions)) if len(record.captions) > 1 else 0]


def _drops(stream: CaptionDraws, section: CaptionSection, epoch: int) -> bool:
    lot = stream.uniform()  # whether or not it is needed: turning dropout on leaves the order of the tags as it was
    every = section.dropout_every_n_epochs
    return lot < section.dropout_rate or bool(every and (epoch + 1) % every == 0)


def _made(caption: str, stream: CaptionDraws, section: CaptionSection, step: int, total_steps: int) -> str:
    pipes = section.dialect == "diffusion_pipe"  # there the prefix stands before the tags, whatever their order
    caption = _one_line(caption if pipes else _framed(caption, section), stream, section)
    mark = section.keep_tokens_separator
    if section.shuffle or section.tag_dropout_rate > 0 or section.token_warmup_step > 0 or (mark and mark in caption):
        caption = _arranged(caption, stream, section, step, total_steps)
    if section.secondary_separator:
        caption = caption.replace(section.secondary_separator, section.separator)
    if pipes:
        caption = f"{section.prefix or ''}{caption}{section.suffix or ''}"
    return _capitalized(caption, stream) if section.shuffle_capitalization else caption


def _capitalized(caption: str, stream: CaptionDraws) -> str:
    """Make the first letter large or small, as likely the one as the other."""
    first = caption[:1].upper() if stream.integer(2) else caption[:1].lower()
    return first + caption[1:]


def _framed(caption: str, section: CaptionSection) -> str:
    """Put prefix and suffix around the caption: of several lines, before the first and behind the last (kohya)."""
    if section.prefix:
        caption = f"{section.prefix} {caption}"
    return f"{caption} {section.suffix}" if section.suffix else caption


def _one_line(caption: str, stream: CaptionDraws, section: CaptionSection) -> str:
    """Draw one of several lines and one word of each wildcard; without wildcards, take the first line."""
    lines = caption.split("\n")
    if not section.enable_wildcard:
        return lines[0]
    line = lines[stream.integer(len(lines)) if len(lines) > 1 else 0]

    def chosen(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        words = match[1].split("|")
        return words[stream.integer(len(words))].replace("{{", "{").replace("}}", "}")

    # behind the last brace that can close a choice none begins: looked for there, it would cost the line's length squared
    end = max((run.end() for run in _CLOSING.finditer(line) if len(run[0]) % 2), default=0)
    return _WILDCARD.sub(chosen, line[:end]) + line[end:].replace("{{", "{").replace("}}", "}")


def _arranged(caption: str, stream: CaptionDraws, section: CaptionSection, step: int, total_steps: int) -> str:
    """Cut a caption into tags, let it grow, shuffle and drop what is loose, and join it: by commas, as kohya does."""
    kept, loose, last = _parts(caption, section)
    loose = loose[: num_tags(len(loose), section, step, total_steps)]
    if section.shuffle:
        loose = [loose[i] for i in stream.permutation(len(loose))]
    if section.tag_dropout_rate > 0:
        loose = [tag for tag in loose if stream.uniform() >= section.tag_dropout_rate]
    return (section.separator if section.dialect == "diffusion_pipe" else ", ").join(kept + loose + last)


def _parts(caption: str, section: CaptionSection) -> tuple[list[str], list[str], list[str]]:
    """Return the tags that stay in front, those that move, and those that stay at the end.

    keep_tokens_separator marks them, "a ||| b, c ||| d"; a caption without one has its first keep_tokens stay.
    """
    mark = section.keep_tokens_separator
    if mark and mark in caption:
        parts = (*caption.split(mark, 2), "")
        front, moving, end = ([tag for tag in _tags(part, section) if tag] for part in parts[:3])
        return front, moving, end
    tags = _tags(caption.strip(), section)
    return tags[: section.keep_tokens], tags[section.keep_tokens :], []


def _tags(text: str, section: CaptionSection) -> list[str]:
    tags = text.split(section.separator)
    return tags if section.dialect == "diffusion_pipe" else [tag.strip() for tag in tags]


def num_tags(count: int, section: CaptionSection, step: int, total_steps: int) -> int:
    """Return how many of `count` loose tags a caption has at a step of the warm-up, and all of them behind it.

    From token_warmup_min they grow to all in token_warmup_step updates; below 1, that is a share of all updates.
    """
    warmup_step = section.token_warmup_step
    warmup = math.floor(warmup_step * total_steps) if warmup_step < 1 else warmup_step
    if step >= warmup:
        return count
    least = section.token_warmup_min
    # kohya's order of operations: the quotient first, in fp64
    return max(0, math.floor(step * ((count - least) / warmup)) + least)
