"""Manifests: every entry that a run wants of an encoder, by address, in the order in which they are encoded."""
