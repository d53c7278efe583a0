"""Video files by PyAV: frames by presentation time, from the key frame before the first one wanted.

Of several video streams the default one is taken, then the largest; cover pictures of music are none. One thread decodes, so
that the same bytes give the same pixels in every worker, whatever was decoded before.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from difftrain.data.media.containers import container_of, refuse_cut_short
from difftrain.data.media.media import Unusable
from difftrain.data.media.video_pixels import to_rgb
from difftrain.io.files import open_regular

if TYPE_CHECKING:
    from av import VideoFrame

__all__ = ["Timeline", "Video", "lateness", "opened"]

_FIRST_PACKETS = 64  # more than any codec reorders
_MAX_ASPECT = 8  # of a pixel; what is longer is damage
_COARSE = Fraction(1, 500)  # a clock that ticks slower than this is exact, or there is no telling what was rounded
_ALPHA_DECODERS = {"vp9": "libvpx-vp9", "vp8": "libvpx"}  # libav's own decoders leave transparency out


class Timeline(NamedTuple):
    """When the frames of a file are shown. Units: seconds from the first frame's time."""

    frames: int
    end: Fraction
    is_constant: bool


def lateness(fps: Fraction, tick: Fraction) -> Fraction:
    """Return by how many seconds a frame may be late for its time, of a clock with such ticks, and is shown at it.

    Clocks are coarse: 1/24 s is 42 ms in Matroska. And 30000/1001 is not 29.97, which nobody wants to see.
    """
    least = 1 / (20 * Fraction(fps))
    return max(least, tick) if tick <= _COARSE and 2 * tick * fps < 1 else least


@contextmanager
def opened(file: BinaryIO | bytes | Path) -> Iterator[BinaryIO]:
    """Open a path, or rewind what is open already. Raises: OSError."""
    if isinstance(file, bytes):
        yield io.BytesIO(file)
    elif isinstance(file, Path):
        with open_regular(file) as stream:
            yield stream  # type: ignore[misc]
    else:
        file.seek(0)
        yield file


@contextmanager
def _reasons() -> Iterator[None]:
    """Turn libav's errors into a reason."""
    import av

    try:
        yield
    except Unusable:
        raise
    except MemoryError:
        raise Unusable("out of memory", "there was not enough memory to decode it") from None
    except (av.error.FFmpegError, ValueError, ArithmeticError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise Unusable("truncated" if isinstance(error, EOFError) else "broken", text) from None


class Video:
    """An open video stream, in front of its first frame.

    Raises: Unusable, of everything.
    """

    def __init__(self, stream: BinaryIO, max_pixels: int) -> None:
        self._file, self._max_pixels = stream, max_pixels
        stream.seek(0)
        self.container_name = container_of(stream.read(64)) or "unknown"
        refuse_cut_short(stream, self.container_name)
        with _reasons():
            self._open()

    def _open(self) -> None:
        import av

        self._file.seek(0)
        form = {"webm": "matroska", "mkv": "matroska", "avi": "avi"}.get(self.container_name, "mov")
        self._container: Any = av.open(self._file, "r", format=form, metadata_errors="replace")
        self._stream = self._best_stream()
        context = self._stream.codec_context
        if context is None:
            raise Unusable("unsupported format", "no decoder for its video codec")
        if context.width * context.height > self._max_pixels:
            raise Unusable("too many pixels", f"{context.width} x {context.height} px in a frame")
        self._time_base = self._stream.time_base or Fraction(1, 1000)
        self._aspect = self._stream.sample_aspect_ratio or Fraction(1)
        if not Fraction(1, _MAX_ASPECT) <= self._aspect <= _MAX_ASPECT:
            raise Unusable("broken", f"pixels of {self._aspect.numerator} x {self._aspect.denominator}")
        self.codec_name = context.name
        self._context = self._decoder(context)
        self._context.thread_count = 1
        # without "explode" damage is painted over with what was there before
        self._context.options = {"err_detect": "explode", "max_pixels": str(self._max_pixels)}
        self._is_counted = form == "avi" and bool(context.has_b_frames)  # AVI keeps no presentation times
        self._head = self._read_head()

    def close(self) -> None:
        """Let go of the decoder; the file stays open."""
        self._container.close()

    def _best_stream(self) -> Any:
        from av.stream import Disposition

        pictures = Disposition.attached_pic | Disposition.timed_thumbnails
        videos = [stream for stream in self._container.streams.video if not stream.disposition & pictures]
        if not videos:
            kinds = sorted({stream.type for stream in self._container.streams})
            names = "only a cover picture and sound" if self._container.streams.video else "only " + " and ".join(kinds)
            raise Unusable("no video", names if kinds else "no streams")
        default = Disposition.default

        def rank(stream: Any) -> tuple[bool, int, int]:
            context = stream.codec_context
            area = context.width * context.height if context else 0
            return bool(stream.disposition & default), area, -stream.index

        return max(videos, key=rank)

    def _decoder(self, context: Any) -> Any:
        import av

        name = _ALPHA_DECODERS.get(context.name)
        if name is None or self._stream.metadata.get("alpha_mode") != "1":
            return context
        decoder = av.CodecContext.create(name, "r")
        decoder.extradata = context.extradata
        return decoder

    # ------------------------------------------------------------------ times

    def _read_head(self) -> list[Any]:
        """Read packets until the first frame's time is sure: where decoding order has passed it."""
        head, self._first, self._rest = [], None, self._container.demux(self._stream)
        for packet in self._rest:
            head.append(packet)
            if not packet.size and packet.pts is None and packet.dts is None:
                break
            if packet.pts is None:
                self._is_counted = True
                break
            if not packet.is_discard:
                self._first = packet.pts if self._first is None else min(self._first, packet.pts)
            if len(head) >= _FIRST_PACKETS:
                break
            if self._first is not None and packet.dts is not None and packet.dts > self._first:
                break
        if not any(packet.size for packet in head):
            raise Unusable("no frames", "no frame is in the video stream")
        return head

    def _interval(self) -> Fraction:
        """Return the seconds of a frame by the file's average rate."""
        rate = self._stream.average_rate or self._stream.guessed_rate
        if not rate or rate <= 0:
            raise Unusable("unknown frame rate", "neither frame times nor a rate are in the file")
        return 1 / Fraction(rate)

    def _at(self, pts: int) -> Fraction:
        return (pts - (self._first or 0)) * self._time_base

    def lateness(self, fps: Fraction) -> Fraction:
        """Return by how many seconds a frame may be late for its time, and is shown at it all the same."""
        return lateness(fps, self._time_base)

    def timeline(self) -> Timeline:
        """Read when frames are shown, from the index where it is complete, else from the packets: nothing is decoded."""
        with _reasons():
            if self._is_counted:
                return self._counted_timeline()
            times, end = self._indexed_times() or self._walked_times()
            if not times:
                raise Unusable("no frames", "no frame is in the video stream")
            even = self._is_even(times)
            return Timeline(len(times), self._rounded(len(times), end) if even else end, even)

    def _is_even(self, times: Sequence[int]) -> bool:
        steps = np.diff(np.asarray(times, np.int64))
        rounding = 1 if self._time_base <= _COARSE else 0
        return not steps.size or bool(abs(steps - np.median(steps)).max() <= rounding)

    def _rounded(self, frames: int, end: Fraction) -> Fraction:
        """Return the end of evenly shown frames, which a coarse clock cuts off: 100 frames of 1/24 s are not 4.166 s."""
        rate = self._stream.average_rate
        exact = Fraction(frames) / Fraction(rate) if rate else end
        return exact if abs(exact - end) <= 2 * self._time_base <= 2 * _COARSE else end

    def _counted_timeline(self) -> Timeline:
        frames = sum(1 for packet in chain(self._head, self._rest) if packet.size)
        return Timeline(frames, frames * self._interval(), True)

    def _indexed_times(self) -> tuple[list[int], Fraction] | None:
        """Return decoding times where they are even, as presentation times are then; None where the index does not tell."""
        stream = self._stream
        entries = stream.index_entries
        if self.container_name not in ("mp4", "mov", "3gp") or not entries or len(entries) != stream.frames:
            return None
        if not stream.duration or stream.duration <= 0:
            return None
        times = [entry.timestamp for entry in entries if not entry.is_discard]
        if not self._is_even(times):
            return None
        start = stream.start_time if stream.start_time is not None else self._first or 0
        return times, self._at(start + stream.duration)

    def _walked_times(self) -> tuple[list[int], Fraction]:
        times, end, last = [], 0, None
        for packet in chain(self._head, self._rest):
            if packet.size and packet.pts is not None and not packet.is_discard:
                times.append(packet.pts)
                if last is None or packet.pts >= last:
                    last, end = packet.pts, packet.pts + (packet.duration or 0)
        times.sort()
        if last is not None and end == last:
            end = last + self._step(times)
        return times, self._at(end)

    def _step(self, times: Sequence[int]) -> int:
        if len(times) > 1:
            return max(1, times[-1] - times[-2])
        return max(1, round(self._interval() / self._time_base))

    # ------------------------------------------------------------------ frames

    def shown_at(self, times: Sequence[Fraction], tolerance: Fraction) -> Iterator[tuple[int, VideoFrame]]:
        """Iterate over (how many of the times in a row, the frame that is shown at them). times: in order, from the first frame's.

        Ends where the file does: the counts add up to fewer than the times then.
        """
        at, current, shown, before = 0, None, Fraction(0), None
        with _reasons():
            for moment, frame in self._frames_from(times[0], tolerance):
                if current is not None and moment <= shown:
                    continue
                count = 0
                while current is not None and at + count < len(times) and moment > times[at + count] + tolerance:
                    count += 1
                if count and current is not None:
                    yield count, current
                    at += count
                if at == len(times):
                    return
                before, shown, current = shown if current is not None else None, moment, frame
            if current is None:
                raise Unusable("no frames", "no frame of it can be decoded")
            end = shown + self._duration(current, shown, before)
            count = sum(1 for moment in times[at:] if moment < end)
            if count:
                yield count, current

    def _duration(self, frame: VideoFrame, shown: Fraction, before: Fraction | None) -> Fraction:
        if not self._is_counted and frame.duration:
            return Fraction(frame.duration) * self._time_base
        if self._is_counted or before is None:
            return self._interval()
        return shown - before

    def _frames_from(self, start: Fraction, tolerance: Fraction) -> Iterator[tuple[Fraction, VideoFrame]]:
        """Decode from the last key frame at or before a time, or from an earlier one where that is none."""
        if self._is_counted:
            interval = self._interval()
            for index, frame in enumerate(self._decode(chain(self._head, self._rest))):
                yield index * interval, frame
            return
        wanted = int(start / self._time_base) + (self._first or 0)
        back, second = 0, max(1, int(1 / self._time_base))
        while max((packet.pts or 0) for packet in self._head) < wanted - back > (self._first or 0):
            frames = self._sought(wanted - back, start + tolerance)
            if frames is not None:
                yield from frames
                return
            back = max(2 * back, second)
        if back:
            self._container.close()
            self._open()
        for frame in self._decode(chain(self._head, self._rest)):
            yield self._moment(frame), frame

    def _moment(self, frame: VideoFrame) -> Fraction:
        if frame.pts is None:
            raise Unusable("broken", "a frame has no time")
        return self._at(frame.pts)

    def _sought(self, pts: int, latest: Fraction) -> Iterator[tuple[Fraction, VideoFrame]] | None:
        """Seek, and decode from there if a key frame is there that is no later than wanted, and that comes out itself.

        Where it does not, pictures are refreshed bit by bit. Frames that are shown before the key frame that decoding
        began with (of an open group) lack what they refer to.
        """
        import av

        try:
            self._container.seek(pts, stream=self._stream, backward=True)
            self._context.flush_buffers()
            packets = self._container.demux(self._stream)
            key = next(packets)
        except (av.error.FFmpegError, StopIteration):
            return None
        if not key.is_keyframe or key.pts is None or self._at(key.pts) > latest:
            return None
        key_moment = self._at(key.pts)
        frames = ((self._moment(frame), frame) for frame in self._decode(chain([key], packets), key.pts))
        kept = ((moment, frame) for moment, frame in frames if moment >= key_moment)
        try:
            first = next(kept, None)
        except av.error.FFmpegError:
            return None
        if first is None or first[0] != key_moment:
            return None
        return chain([first], kept)

    def _decode(self, packets: Iterator[Any] | Sequence[Any], key_pts: int | None = None) -> Iterator[VideoFrame]:
        """Decode packets. key_pts: of the key frame that a seek came to; packets that are shown before it may fail."""
        import av

        for packet in packets:
            if not packet.size:
                continue
            try:
                yield from self._context.decode(packet)
            except av.error.InvalidDataError:
                if key_pts is None or packet.pts is None or packet.pts >= key_pts:
                    raise
        yield from self._context.decode(None)

    # ------------------------------------------------------------------ pixels

    def first_picture(self) -> np.ndarray:
        """Decode the first frame that can be, and little more. Shape: (H, W, 3) uint8, upright."""
        with _reasons():
            frame = next(self._decode(self._head), None)
            if frame is None:
                self._container.close()
                self._open()
                frame = next(self._decode(chain(self._head, self._rest)), None)
        if frame is None:
            raise Unusable("no frames", "no frame of it can be decoded")
        return self.to_rgb(frame)

    def to_rgb(self, frame: VideoFrame) -> np.ndarray:
        """Convert a frame. Shape: (H, W, 3) uint8, upright, with square pixels."""
        with _reasons():
            return to_rgb(frame, self._aspect, self._max_pixels)
