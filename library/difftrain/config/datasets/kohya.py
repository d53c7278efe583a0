"""kohya's data set TOML as data sets: the innermost table that names a value has the last word, then the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.config import hub_ids
from difftrain.config.datasets.datasets import Resolved
from difftrain.config.datasets.keys import KOHYA, DatasetKey, SubsetKind
from difftrain.config.datasets.reader import Table, TomlReader, converted
from difftrain.config.paths import expanded, is_file, is_folder, toml_entry_point
from difftrain.config.schema.families import row_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.sections import ClipSection, DatasetSection, SubsetSection, TrainConfig
from difftrain.config.spellings.spelling import option

# the command line's fields that a file can set for every data set; `sizes` it always does, by the keys of buckets
OVERRIDABLE = {key.run for key in KOHYA.values() if key.run} | {"data.sizes"}
_NAMED = ("image_dir", "metadata_file", "conditioning_data_dir")  # a subset is told by which of them it names
_MARK = {"dreambooth": "image_dir alone", "finetune": "metadata_file", "controlnet": "conditioning_data_dir"}


def resolve(path: Path, cfg: TrainConfig) -> Resolved:
    """Read a file and settle every setting of its data sets; `cfg` is what the command line says."""
    reader = KohyaReader(path, cfg)
    tables = reader.tables(f"{option('data.dataset_config')}={path}")
    return reader.out if tables is None else reader.take(tables)


class KohyaReader(TomlReader):
    """Reads [general], [[datasets]] and their [[datasets.subsets]]."""

    file = "kohya"

    def take(self, tables: Table) -> Resolved:
        """Settle every setting of the data sets."""
        self.fell_back: set[str] = set()  # fields of the command line that some data set takes
        self.seeds: set[int | None] = set()
        for name in sorted(tables.keys() - {"general", "datasets"}):
            if name == "directory":
                self.fault(
                    name,
                    "belongs to diffusion-pipe's dataset TOML",
                    f"{toml_entry_point()} takes that format: --dataset",
                )
                continue
            self.fault(name, "no such table", did_you_mean(name, ("general", "datasets")) or "[general], [[datasets]]")
        general = tables.get("general", {})
        is_table = self.is_table(general, "[general]", "[general]")
        general = self.checked(general, "[general]", "[general]") if is_table else {}
        datasets = self.listed(tables.get("datasets"), "[[datasets]]")
        sections = [self.dataset(dataset, f"[[datasets]] {n}", general) for n, dataset in enumerate(datasets, 1)]

        # what is said of the file as a whole
        out = self.out
        out.datasets = tuple(section for section in sections if section.subsets)
        if not out.datasets and not out.faults:
            self.fault("[[datasets]]", "every subset is left out, since num_repeats = 0", "give one at least 1")
        if len(self.seeds) > 1:
            self.fault(
                "validation_seed", "differs between datasets", "one seed decides what is held out of all datasets"
            )
        elif self.seeds:
            out.validation_seed = self.seeds.pop()
        seed = set() if out.validation_seed is None else {"validation.seed"}
        out.overridden = OVERRIDABLE - self.fell_back | seed
        return out

    def listed(self, tables: Any, location: str) -> list[Table]:
        """Return an array of tables, which must have at least one."""
        if isinstance(tables, dict):
            tables = [tables]
        if isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables):
            return tables
        self.fault(location, "is missing" if not tables else "must be a list of tables", f"begin each with {location}")
        return []

    def value(self, key: DatasetKey, levels: tuple[Table, ...]) -> Any:
        """Return the value of the innermost table that has one, else the command line's."""
        for table in levels:
            if key.name in table:
                return converted(key, table[key.name])
        if not key.run:
            return SubsetSection.model_fields[key.field].default
        self.fell_back.add(key.run)
        section, _, field = key.run.partition(".")
        value = getattr(getattr(self.cfg, section), field)
        return value[0] if key.name == "num_repeats" else value

    def fields(self, section: str, kind: SubsetKind, levels: tuple[Table, ...]) -> dict[str, Any]:
        """Return the fields of a section that keys of such a subset set, whatever table they come from."""
        keys = [key for key in KOHYA.values() if key.to.startswith(f"{section}.") and key.name not in _NAMED]
        return {key.field: self.value(key, levels) for key in keys if section != "subset" or kind in key.subsets}

    def dataset(self, table: Table, location: str, general: Table) -> DatasetSection:
        """Resolve one data set with its subsets."""
        subsets = self.listed(table.get("subsets"), "[[datasets.subsets]]") if "subsets" in table else []
        if not subsets:
            self.fault(location, "has no subset", "begin each with [[datasets.subsets]]")
        own = self.checked(
            {name: value for name, value in table.items() if name != "subsets"}, "[[datasets]]", location
        )
        levels = (own, general)
        values = self.fields("dataset", "dreambooth", levels)
        self.seeds.update([level["validation_seed"] for level in levels if "validation_seed" in level][:1])
        if values["resolution"] is None and not any(fault.where.endswith(" resolution") for fault in self.out.faults):
            self.fault(location, "resolution is missing", "give a number, or [width, height]; for SDXL 1024")
        made: list[SubsetSection] = []
        for n, entry in enumerate(subsets, 1):
            subset = self.subset(entry, f"{location} [[datasets.subsets]] {n}", levels)
            if subset is not None and (subset.image_dir, subset.metadata_file) in [
                (one.image_dir, one.metadata_file) for one in made
            ]:
                self.note(location, f"{subset.metadata_file or subset.image_dir} appears twice: the first counts")
            elif subset is not None:
                made.append(subset)
        if made and all(subset.is_reg for subset in made):
            self.fault(location, "has only regularisation images", "add a subset to train on")
        clips = {name: getattr(self.cfg.data, name) for name in ClipSection.model_fields}
        return DatasetSection(**values, **clips, subsets=tuple(made))

    def subset(self, table: Table, location: str, levels: tuple[Table, ...]) -> SubsetSection | None:
        """Resolve one subset; None where it cannot be used, or asks not to be."""
        own = self.checked(table, "[[datasets.subsets]]", location)

        # the key that only its kind has tells what it is, as in kohya's scripts; keys of another kind mean nothing in it
        kind: SubsetKind = "controlnet" if "conditioning_data_dir" in table else "dreambooth"
        kind = "finetune" if "metadata_file" in table else kind
        if {"metadata_file", "conditioning_data_dir"} <= own.keys():
            self.fault(location, "has both metadata_file and conditioning_data_dir", "a subset is of one kind")
        for name in sorted(own.keys() - set(_NAMED)):
            if kind not in KOHYA[name].subsets:
                self.fault(f"{location} {name}", f"has no effect together with {_MARK[kind]}", "leave it out")

        # its own settings; masks, where it names none, are those of the command line
        fields = self.fields("subset", kind, (own, *levels))
        captions = self.fields("captions", kind, (own, *levels))
        masks = own.get("conditioning_data_dir") if kind == "controlnet" else None
        fields["control_dirs"] = self.cfg.data.control_dirs
        if masks and row_of(self.cfg).control and not self.cfg.loss.masked:  # kohya's ControlNet data: pairs of images
            fields["control_dirs"], masks = (masks,), None
        fields["conditioning_dir"] = masks or self.cfg.data.conditioning_dir
        fields["image_dir"], fields["metadata_file"] = own.get("image_dir"), own.get("metadata_file")

        # what a subset of this kind cannot do without, and what leaves it out
        for name, what, remedy in _missing(kind, own):
            if name not in table or name in own:  # a value of the wrong type has been named
                self.fault(f"{location} {name}", what, remedy)
        if fields["repeats"] == 0:
            self.note(location, "left out, since num_repeats = 0")
            return None
        if kind != "finetune" and not fields["image_dir"]:
            return None
        caption_section = self.cfg.captions.model_copy(update=captions)
        return SubsetSection(**fields, captions=caption_section, flat=kind != "finetune")


def _missing(kind: SubsetKind, own: Table) -> Iterator[tuple[str, str, str]]:
    """Find what a subset names that is not there, or does not name: (key, what is wrong, what would be right)."""
    required = "metadata_file" if kind == "finetune" else "image_dir"
    if required not in own:
        yield required, "is missing", f"every subset of this kind needs {required}"
    for name, is_there, word in (
        ("image_dir", lambda text: not hub_ids.missing(text), "folder"),
        ("metadata_file", lambda text: is_file(expanded(text)), "file"),
        ("conditioning_data_dir", lambda text: is_folder(expanded(text)), "folder"),
    ):
        if name in own and not is_there(own[name]):
            yield name, f"no such {word}: {own[name]!r}", f"give the path of a {word}"
