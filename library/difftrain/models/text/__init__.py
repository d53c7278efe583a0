"""Captions on their way to a text encoder: vocabularies, and the ids that they make."""
