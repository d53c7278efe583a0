"""Transformers' tokenizers over our vocabularies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from difftrain.models.text.clip_vocabulary import ClipVocabulary


def transformers_tokenizer(vocabulary: Any) -> Any:
    """Return the tokenizer that diffusers' pipelines take."""
    from transformers import CLIPTokenizerFast, T5TokenizerFast

    kind = CLIPTokenizerFast if isinstance(vocabulary, ClipVocabulary) else T5TokenizerFast
    with tempfile.TemporaryDirectory() as folder:
        vocabulary.save(Path(folder))
        return kind.from_pretrained(folder)
