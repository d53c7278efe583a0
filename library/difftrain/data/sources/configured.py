"""From the configured folders to sources: what kind each is, how often it is used, and what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.datasets.clips import reads_clips
from difftrain.config.datasets.datasets import datasets_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, DataFault, Fault
from difftrain.data.media.media import Unusable, decode_rgba
from difftrain.data.sources.base import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    SourceInfo,
    is_picture,
    printable,
    read_image,
    split_suffix,
)
from difftrain.data.sources.folder import FRAMES, is_folder, walk
from difftrain.data.sources.image_folder import has_metadata
from difftrain.data.sources.side_files import SUFFIX

if TYPE_CHECKING:
    from difftrain.config.schema.sections import CaptionSection, DataSection, DatasetSection, SubsetSection


CAPTION_SUFFIXES = (".caption", ".txt")  # tried in this order where none is configured
_SHARDS = {".tar": "tar", ".parquet": "parquet"}


@dataclass
class Configured:
    """The sources of a run, and what was noticed while they were found."""

    infos: list[SourceInfo] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kohya: list[tuple[Path, list[KohyaFolder], bool]] = field(default_factory=list)  # and whether videos are read
    kinds: dict[tuple[Path, int | None, bool], tuple[str, int]] = field(default_factory=dict)  # of folders looked at

    def kind(self, root: Path, deepest: int | None, *, videos: bool) -> tuple[str, int]:
        """Return the kind of a folder and the depth of its data, looked at once. Raises DataFault, as _kind."""
        if (root, deepest, videos) not in self.kinds:
            self.kinds[root, deepest, videos] = _kind(root, deepest, videos=videos)
        return self.kinds[root, deepest, videos]

    def outside(self) -> Iterator[str]:
        """Iterate over the pictures that lie in none of a kohya root's folders.

        Raises: DataFault where a folder cannot be listed.
        """
        for root, folders, videos in self.kohya:
            try:
                for path in outside(root, folders, videos=videos):
                    yield printable(f"{root}/{path}")
            except OSError as error:
                raise DataFault(f"{error.filename or root}: cannot be listed ({error.strerror})") from None


def configured_sources(data: DataSection, captions: CaptionSection) -> Configured:
    """Find out what each configured folder holds.

    Raises: ConfigFault where repeats don't fit; DataFault that names every folder that is missing or empty.
    """
    if not (data.dirs or data.datasets or data.dataset_class):
        raise ConfigFault([Fault("data.dirs", "no data is given", "name a folder of images, tars or parquet files")])
    if data.dirs and len(data.repeats) not in (1, len(data.dirs)):
        raise ConfigFault(
            [
                Fault(
                    "data.repeats",
                    f"{len(data.repeats)} numbers for {len(data.dirs)} folders",
                    "give one, or one for each",
                )
            ]
        )

    # every folder is looked at, so that all that are missing or empty are named at once
    made, faults = Configured(), []
    number = 0
    for ordinal, dataset in enumerate(datasets_of(data, captions)):
        for index, subset in enumerate(dataset.subsets):
            try:
                _add(made, {"name": str(number), "dataset": ordinal, "subset": index}, dataset, subset, data)
            except DataFault as fault:
                faults.append(str(fault))
            number += 1

    # what no index can be made of
    if faults:
        raise DataFault("\n".join(faults))
    if len(made.infos) > 1 << 16:
        raise DataFault(f"{len(made.infos)} sources: an index holds at most 65,536")
    return made


def _absolute(path_text: str) -> Path:
    """Return the absolute path; a file that is a link keeps its name, which says what it is."""
    path = Path(path_text).expanduser()
    return path.parent.resolve() / path.name if path.is_file() else path.resolve()


def class_argument(subset: SubsetSection) -> str:
    """Return what a data set class is made with: the subset's folder, or nothing."""
    return str(_absolute(subset.image_dir)) if subset.image_dir else ""


def _mask(path: Path) -> Path:
    """Look at a mask that many pictures share before any of them is. Raises DataFault where it is none, or all black."""
    try:
        pixels, _ = decode_rgba(read_image(path))
    except (OSError, Unusable) as error:
        raise DataFault(f"{path}: cannot be used as a mask ({error}); give an image: white is trained on") from None
    if not pixels[..., 0].any():
        raise DataFault(f"{path}: entirely black, so nothing would be trained under it; white is trained on")
    return path


def repeats(count: float, times: int = 1) -> int | float:
    """Return how often an epoch uses a picture: a whole number as such, 0.1 exactly a tenth."""
    product = Fraction(str(count)) * times
    return product.numerator if product.denominator == 1 else float(product)


def _add(
    made: Configured, known: dict[str, Any], dataset: DatasetSection, subset: SubsetSection, data: DataSection
) -> None:
    """Add the sources of one subset, of which some facts are known already."""
    extension = subset.captions.extension
    suffixes: tuple[str, ...] = (_suffix(extension),) if extension else CAPTION_SUFFIXES
    known |= {"is_reg": subset.is_reg, "multi_line": subset.captions.enable_wildcard, "flat": subset.flat}
    of_file: dict[str, Any] = {"captions_file": subset.captions_file} if subset.captions_file else {}
    if of_file:
        suffixes = ()  # caption files beside it are passed over
    known["masks"] = str(_absolute(subset.conditioning_dir)) if subset.conditioning_dir else ""
    known["default_mask"] = str(_mask(_absolute(subset.default_mask))) if subset.default_mask else ""
    known |= {
        "num_control": data.num_control,
        "control": tuple(str(_absolute(folder)) for folder in subset.control_dirs),
        "control_columns": data.control_columns,
    }
    if reads_clips(dataset.frame_buckets):
        known["frame_buckets"] = tuple(frames for frames in dataset.frame_buckets if frames > 1)
        known["fps"] = str(Fraction(str(dataset.framerate or data.framerate)).limit_denominator(1001))
        known["clip_mode"] = dataset.video_clip_mode
        suffixes = suffixes if SUFFIX in suffixes else (*suffixes, SUFFIX)
    known |= {"masks_optional": subset.masks_optional, "share": subset.share, "split": data.split or ""}
    known |= {"allow_empty": subset.captions.allow_empty, "whole_text": subset.captions.dialect == "diffusion_pipe"}

    def add(kind: str, root: Path | str, times: int = 1, **more: object) -> None:
        if data.num_control and not subset.control_dirs and kind not in _SHARDS.values():
            raise DataFault(_unpaired(root))
        facts = {"ordinal": len(made.infos), "kind": kind, "root": str(root), "repeats": repeats(subset.repeats, times)}
        made.infos.append(SourceInfo(**(known | facts | more)))  # type: ignore[arg-type]

    # --- a class of the user's, or a metadata file: they name their pictures themselves
    if subset.dataset_class:
        add("class", subset.dataset_class, only=class_argument(subset))
        made.notes.append(f"{subset.dataset_class}: images as the class returns them")
        return
    if subset.metadata_file:
        file = _absolute(subset.metadata_file)
        image_dir = _absolute(subset.image_dir) if subset.image_dir else file.parent
        add("metadata", image_dir, only=os.path.relpath(file, image_dir), separator=subset.captions.separator)
        made.notes.append(f"{image_dir}: images and captions as listed in {file.name}")
        return
    # --- one tar or parquet file
    image_dir = _absolute(subset.image_dir or "")
    columns: dict[str, Any] = {"image_column": data.image_column or "", "caption_column": data.caption_column or ""}
    if image_dir.is_file() and image_dir.suffix.lower() in _SHARDS:
        kind = _SHARDS[image_dir.suffix.lower()]
        add(kind, image_dir.parent, only=image_dir.name, **(columns if kind == "parquet" else {}))
        return
    # --- a folder, whose kind is read from what is in it
    videos = reads_clips(dataset.frame_buckets)
    kind, depth = made.kind(image_dir, 0 if subset.flat else None, videos=videos)
    made.notes.append(f"{image_dir}: {_SENTENCES[kind]}")
    if data.split:
        made.notes[-1] += f"; its {data.split} split: files named for another split are left out"
    if kind == "folder" and data.caption_column and has_metadata(image_dir):
        made.notes[-1] = made.notes[-1].replace(_SENTENCES[kind], _SENTENCES["imagefolder"])
        add("imagefolder", image_dir, caption_column=data.caption_column)
        return
    as_kohya = subset.captions.dialect == "kohya"
    folders: list[KohyaFolder] = []
    if kind == "folder" and (depth == 1 or (as_kohya and depth == 0 and not subset.flat)):
        folders = kohya_folders(image_dir, bare=as_kohya, videos=videos)
    if folders:
        made.kohya.append((image_dir, folders, videos))
        made.notes[-1:] = _about_kohya(image_dir, folders, subset.repeats if as_kohya else 1, videos=videos)
        for folder in folders:
            # a folder's own number is what counts, and what lies below it is nobody's (kohya)
            times = {"repeats": folder.repeats} if as_kohya else {}
            more = {"prefix": f"{folder.name}/", "words": folder.words, "flat": True, "suffixes": suffixes} | times
            add("folder", image_dir, folder.repeats, **more, **of_file)
    elif kind == "folder":
        add(kind, image_dir, suffixes=suffixes, words=subset.class_tokens or "", **of_file)
    else:
        add(kind, image_dir, **(columns if kind == "parquet" else of_file))
        if of_file and kind == "parquet":
            made.notes.append(
                f"{image_dir}: {subset.captions_file} has no effect: parquet files contain their captions"
            )
        if subset.class_tokens:
            made.notes.append(f"{image_dir}: class_tokens have no effect: {kind} files contain their captions")


def _unpaired(root: Path | str) -> str:
    """Say that references are wanted and nobody says where they are."""
    return (
        f"{root}: this family learns from reference images ({option('data.num_control')}), and nothing says where those of these "
        f"images are; give {option('data.control_dirs')}, or control_path in the dataset TOML: a folder of images of the same names"
    )


def _about_kohya(root: Path, folders: list[KohyaFolder], count: float, *, videos: bool) -> Iterator[str]:
    """Say which class folders there are, and what next to and below them is not read. count: repeats of the settings."""
    listed = ", ".join(f"{folder.name} x {folder.repeats}" for folder in folders[:8])
    more = f" and {len(folders) - 8} more" if len(folders) > 8 else ""
    yield f"{root}: kohya's <repeats>_<class> folders: {listed}{more}"
    if bare := [folder.name for folder in folders if not folder.words]:
        yield f"{root}: no class words in {', '.join(bare[:8])}: only caption files caption their images"
    left = sorted(outside(root, folders, videos=videos))
    if left:
        yield (
            f"{root}: {len(left):,} images lie next to or below these folders and are not trained on, as in kohya's "
            f"scripts, for example {printable(left[0])}"
        )
    if count != 1:
        yield f"{root}: {option('data.repeats')} has no effect here: the number of each folder's name counts"


_SENTENCES = {
    "folder": "images with caption files",
    "imagefolder": "images and captions as listed in metadata.jsonl, .csv or .parquet",
    "tar": "tars, read in place; other files next to them are not read",
    "parquet": "parquet files",
}


def _kind(root: Path, deepest: int | None = None, *, videos: bool = False) -> tuple[str, int]:
    """Return the kind of a folder and the depth at which its data begins: the first level that holds any decides.

    deepest: the last level that is looked at. Raises: DataFault where there is no folder, or none of our kinds in it.
    """
    if not root.exists():
        raise DataFault(
            f"{root}: there is no such folder (data.dirs, {option('data.dirs')}); give one that holds images"
        )
    if not root.is_dir():
        raise DataFault(f"{root}: neither a folder nor a .tar or .parquet file (data.dirs, {option('data.dirs')})")
    level, depth, seen = [root], 0, Counter[str]()
    visited: set[tuple[int, int]] = set()
    while level and (deepest is None or depth <= deepest):
        suffixes, below = _look(level, visited, videos=videos)
        seen += suffixes
        if kind := kind_of_suffixes(suffixes, videos=videos):
            return kind, depth
        level, depth = below, depth + 1
    counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in seen.most_common(5)) or "nothing"
    where = "at any depth" if deepest is None else "in the folder itself (image_dir leaves out its subfolders)"
    unread = (
        ""
        if videos or not seen.keys() & VIDEO_SUFFIXES
        else f"; {option('data.frame_buckets')} says which videos are read"
    )
    raise DataFault(
        f"{root}: no images here {where}, loose ({', '.join(sorted(IMAGE_SUFFIXES))}) or in .tar or .parquet "
        f"files; found: {counts}{unread}"
    )


_VIDEO = "a video"  # stands for the suffixes of videos, where they are read
# tars go first (LAION keeps parquet beside them), and pictures before parquet (which may be their metadata)
_ORDER: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda suffix: suffix == ".tar", "tar"),
    (lambda suffix: suffix in IMAGE_SUFFIXES or suffix == _VIDEO, "folder"),
    (lambda suffix: suffix == ".parquet", "parquet"),
)


def kind_of_suffixes(suffixes: Iterable[str], *, videos: bool = False) -> str:
    """Return the kind of a level by the suffixes of its files, or "" where none is data. videos: these are data, too."""
    moving = (*VIDEO_SUFFIXES, FRAMES)
    suffixes = {_VIDEO if videos and suffix in moving else suffix for suffix in suffixes}
    return next((kind for fits, kind in _ORDER if any(map(fits, suffixes))), "")


def _look(level: list[Path], visited: set[tuple[int, int]], *, videos: bool) -> tuple[Counter[str], list[Path]]:
    """Count the suffixes of a level's files, and of its folders of frames; return its other sub-folders."""
    suffixes, below = Counter[str](), []
    for folder in level:
        stat = folder.stat()
        if (stat.st_dev, stat.st_ino) in visited:
            continue
        visited.add((stat.st_dev, stat.st_ino))
        try:
            entries = os.scandir(folder)
        except OSError as error:
            raise DataFault(f"{folder}: cannot be listed ({error.strerror})") from None
        with entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if is_folder(entry) and not (videos and entry.name.lower().endswith(FRAMES)):
                    below.append(Path(entry.path))
                else:
                    suffixes[split_suffix(entry.name)[1]] += 1
    return suffixes, below


def _suffix(extension: str) -> str:
    return extension.lower() if extension.startswith(".") else f".{extension.lower()}"


# --- kohya's folders: `<repeats>_<class words>` below the data folder, each its own number of repeats


@dataclass(frozen=True)
class KohyaFolder:
    """One sub-folder: its name, how often an epoch uses it, and the caption of pictures that have none."""

    name: str
    repeats: int
    words: str


def parse_name(name: str, *, bare: bool = False) -> KohyaFolder | None:
    """Read `10_sks dog` as (10, "sks dog"); None where it is no such name. Fewer than one repeat is none.

    bare: a number alone is one, without words (kohya), but for 000, 001, ...: large folders are often divided so.
    """
    number, line, words = name.partition("_")
    if not (number.isascii() and number.isdigit() and len(number) < 10) or int(number) < 1:
        return None
    if not line and (not bare or number.startswith("0")):
        return None
    return KohyaFolder(name, int(number), words.strip())


def kohya_folders(root: Path, *, bare: bool = False, videos: bool = False) -> list[KohyaFolder]:
    """Return the sub-folders of kohya's layout that hold pictures directly, by name."""
    folders = []
    for entry in os.scandir(root):
        frames = videos and entry.name.lower().endswith(FRAMES)  # a clip, and no class
        parsed = parse_name(entry.name, bare=bare) if is_folder(entry) and not frames else None
        if parsed is not None and _holds_data(Path(entry.path), videos=videos):
            folders.append(parsed)
    return sorted(folders, key=lambda folder: folder.name)


def outside(root: Path, folders: list[KohyaFolder], *, videos: bool = False) -> Iterator[str]:
    """Iterate over pictures that lie in none of the folders, or below one: kohya passes them over, we name them."""
    inside = {folder.name for folder in folders}
    for path, _ in walk(root, leaf=FRAMES if videos else None):
        folder, _, name = path.rpartition("/")
        if _is_data(name, videos=videos) and folder not in inside:
            yield path


def _holds_data(folder: Path, *, videos: bool) -> bool:
    with os.scandir(folder) as entries:
        return any(_is_data(entry.name, videos=videos) and not entry.name.startswith(".") for entry in entries)


def _is_data(name: str, *, videos: bool) -> bool:
    return is_picture(name) or (videos and split_suffix(name)[1] in (*VIDEO_SUFFIXES, FRAMES))
