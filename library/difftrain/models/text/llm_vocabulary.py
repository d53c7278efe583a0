"""Vocabularies of language models: any tokenizer.json as it is shipped, or a small byte-level one with a template's marks."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.models.text.clip_vocabulary import byte_symbols
from difftrain.models.text.t5_vocabulary import bare_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "<|endoftext|>"
_MARK = re.compile(r"<\|[^|<>]+\|>|<[A-Z][A-Za-z ]+>")  # <|im_start|>, <Prompt Start>
# what may lie beside a tokenizer.json, and is exported with it
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True)
class LlmVocabulary:
    """A tokenizer.json, as text. pad: the token that fills up. folder: where it lay, whose files are exported."""

    content: str
    pad: str = PAD
    folder: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> LlmVocabulary:
        """Read a tokenizer's folder. Raises ValueError that says what is missing."""
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            text = file.read_text(encoding="utf-8")
            json.loads(text)["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no tokenizer.json: {error!r}") from None
        config = folder / "tokenizer_config.json"
        pad = json.loads(config.read_text(encoding="utf-8")).get("pad_token") if config.is_file() else None
        pad = pad.get("content") if isinstance(pad, dict) else pad
        vocabulary = cls(text, pad or PAD, folder if folder.is_dir() else None)
        if vocabulary.backend().token_to_id(vocabulary.pad) is None:
            raise ValueError(f"{file} has no token {vocabulary.pad!r} to fill texts up with")
        return vocabulary

    @classmethod
    def small(cls, template: str, size: int) -> LlmVocabulary:
        """Make one of 256 bytes and a template's marks. Raises ValueError where there is no room for them."""
        marks = list(dict.fromkeys([PAD, *marks_of(template)]))
        if 256 + len(marks) > size:
            raise ValueError(f"a built-in vocabulary has {256 + len(marks)} tokens, {size} are allowed")
        added = [
            {"id": 256 + index, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, mark in enumerate(marks)
        ]  # fmt: skip
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        content: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFC"}, "pre_tokenizer": bytes_only, "post_processor": None, "decoder": bytes_only,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                      "vocab": {symbol: number for number, symbol in enumerate(byte_symbols())}, "merges": []},
        }  # fmt: skip
        return cls(json.dumps(content, ensure_ascii=False))

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "pad": self.pad, "folder": self.folder}

    @functools.cached_property
    def digest(self) -> str:
        """Return what tells it from others."""
        return hashlib.blake2b(self.content.encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def pad_id(self) -> int:
        return int(self.backend().token_to_id(self.pad) or 0)

    def __len__(self) -> int:
        return int(self.backend().get_vocab_size())

    def lacks(self, template: str) -> list[str]:
        """Name the marks of a template that are no tokens here: they would be read as plain text."""
        backend = self.backend()
        return [mark for mark in marks_of(template) if mark.startswith("<|") and backend.token_to_id(mark) is None]

    def backend(self) -> Tokenizer:
        """Build the tokenizer that turns text into ids, without padding and cutting."""
        return bare_tokenizer(self.content)

    def save(self, folder: Path) -> None:
        """Write a folder that transformers loads: what was read, or the small one."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            for name in _FILES:
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, folder / name)
            return
        (folder / "tokenizer.json").write_text(self.content, encoding="utf-8")
        model = json.loads(self.content)
        marks = [token["content"] for token in model["added_tokens"]]
        config = {
            "tokenizer_class": "Qwen2Tokenizer", "pad_token": self.pad, "eos_token": self.pad, "unk_token": None,
            "add_prefix_space": False, "additional_special_tokens": [mark for mark in marks if mark != self.pad],
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        vocabulary = json.dumps(model["model"]["vocab"], ensure_ascii=False)
        (folder / "vocab.json").write_text(vocabulary, encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def marks_of(template: str) -> Iterable[str]:
    """Return the marks that stand in a template, each once."""
    return dict.fromkeys(_MARK.findall(template))
