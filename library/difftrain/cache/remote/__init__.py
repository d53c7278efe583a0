"""A cache on an object store: copied where it is small, else read by ranges."""
