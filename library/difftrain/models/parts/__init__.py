"""Pieces that several families share: text encoders and their vocabularies, VAEs, weight files."""
