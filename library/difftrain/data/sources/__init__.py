"""Sources: where pictures and captions lie. One file a kind; this registry names them."""

from __future__ import annotations

from importlib import import_module

from difftrain.data.sources.base import DataSource, SourceInfo

SOURCES = {
    "folder": "difftrain.data.sources.folder:FolderSource",
    "tar": "difftrain.data.sources.tar:TarSource",
    "parquet": "difftrain.data.sources.parquet:ParquetSource",
    "imagefolder": "difftrain.data.sources.image_folder:ImageFolderSource",
    "metadata": "difftrain.data.sources.metadata:MetadataSource",
    "class": "difftrain.data.sources.own_class:ClassSource",
}

__all__ = ["SOURCES", "Source", "SourceInfo", "open_source"]


def open_source(info: SourceInfo) -> DataSource:
    """Make the source that an entry of an index names."""
    module, _, attribute = SOURCES[info.kind].partition(":")
    made: DataSource = getattr(import_module(module), attribute)(info)
    return made
