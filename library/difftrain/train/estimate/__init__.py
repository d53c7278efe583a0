"""Whether a run fits, before a device is touched: `footprint` counts memory and disk, `dry_run` says it."""
