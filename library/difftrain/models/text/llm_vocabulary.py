"""Vocabularies of language models: any tokenizer.json as it is shipped, or a small byte-level one with a template's marks."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.io.files import read_json_object, read_regular
from difftrain.models.facts import Text
from difftrain.models.text.clip_vocabulary import byte_symbols, merges_of
from difftrain.models.text.t5_vocabulary import bare_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD = "<|endoftext|>"
BOS = "<|startoftext|>"
# <|im_start|>, <s>, </think>, [INST], and <Prompt Start>, which is plain text to some
_MARK = re.compile(r"<\|[^|<>]+\|>|</?[a-z]+>|\[/?[A-Z_]+\]|<[A-Z][A-Za-z ]+>")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of what reads pictures too
# what may lie beside a tokenizer.json, and is exported with it
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", *_PROCESSORS,
)  # fmt: skip


@dataclass(frozen=True)
class LlmVocabulary:
    """A tokenizer.json, as text. pad: the token that fills up. folder: where it lay, whose files are exported.

    settings: of a small one, more of its tokenizer_config.json.
    """

    content: str
    pad: str = PAD
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, encoder: Text | None = None) -> LlmVocabulary:
        """Read a tokenizer's folder, for a text encoder. Raises ValueError that says what is missing."""
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            text = read_regular(file, 1 << 27).decode("utf-8")
            json.loads(text)["model"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is not a tokenizer.json: {error!r}") from None
        config = folder / "tokenizer_config.json"
        filler = "eos_token" if encoder is not None and encoder.pads_end else "pad_token"
        pad = (read_json_object(config) or {}).get(filler)
        pad = pad.get("content") if isinstance(pad, dict) else pad
        pad = pad if isinstance(pad, str) else None
        vocabulary = cls(text, pad or PAD, folder if folder.is_dir() else None)
        if vocabulary.backend().token_to_id(vocabulary.pad) is None:
            raise ValueError(f"{file} has no token {vocabulary.pad!r} to pad texts with")
        return vocabulary

    @classmethod
    def small(cls, text: Text, size: int) -> LlmVocabulary:
        """Make one of 256 bytes and a template's marks. Raises ValueError where there is no room for them.

        Where a text may be read without a template, some token has to stand before every text.
        """
        made = cls._made(text, ())
        if len(made) > size:
            raise ValueError(f"a built-in vocabulary has {len(made)} tokens, {size} are allowed")
        return made

    @classmethod
    def learn(cls, text: Text, captions: Iterable[str]) -> LlmVocabulary:
        """Make one that has every word of a template and of captions as a token, as large ones have common words."""
        counts: Counter[str] = Counter()
        split = bare_tokenizer(cls._made(text, ()).content).pre_tokenizer
        for written in (*_between_marks(text.template), *captions):
            counts.update(word for word, _ in split.pre_tokenize_str(written))
        return cls._made(text, tuple(merges_of((list(word), counts[word]) for word in sorted(counts))))

    @classmethod
    def _made(cls, text: Text, merges: Sequence[tuple[str, str]]) -> LlmVocabulary:
        begins = bool(text.bare) or text.template == "{}"
        marks = list(dict.fromkeys([PAD, *([BOS] if begins else ()), *marks_of(text.template)]))
        pieces = [*byte_symbols(), *(first + second for first, second in merges)]
        added = [
            {"id": len(pieces) + index, "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for index, mark in enumerate(marks)
        ]  # fmt: skip
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        content: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "NFC"}, "pre_tokenizer": bytes_only, "post_processor": None, "decoder": bytes_only,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                      "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
                      "vocab": {symbol: number for number, symbol in enumerate(pieces)},
                      "merges": [list(pair) for pair in merges]},
        }  # fmt: skip
        if begins:
            first, caption = {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            known = {BOS: {"id": BOS, "ids": [len(pieces) + marks.index(BOS)], "tokens": [BOS]}}
            content["post_processor"] = {
                "type": "TemplateProcessing", "single": [first, caption], "pair": [first, caption, caption],
                "special_tokens": known,
            }  # fmt: skip
        settings: dict[str, Any] = {"padding_side": "left"} if text.pads_left else {}
        if text.template != "{}":
            settings["chat_template"] = _chat(*text.template.split("{}"))
        return cls(json.dumps(content, ensure_ascii=False), settings=settings)

    def __getstate__(self) -> dict[str, Any]:
        return {key: self.__dict__[key] for key in ("content", "pad", "folder", "settings")}

    @property
    def reads_pictures(self) -> bool:
        """Tell whether it is a processor's, which also prepares pictures."""
        return self.folder is not None and any((self.folder / name).is_file() for name in _PROCESSORS)

    @functools.cached_property
    def digest(self) -> str:
        """Return what tells it from others."""
        return hashlib.blake2b(self.content.encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def pad_id(self) -> int:
        return int(self.backend().token_to_id(self.pad) or 0)

    @property
    def tokenizer_class(self) -> str:
        """Name the class of transformers that reads what `save` writes, where its files name one."""
        config = read_json_object(self.folder / "tokenizer_config.json") if self.folder is not None else None
        # Qwen's makes its own rules, whatever the file says of a first token
        small = "PreTrainedTokenizerFast" if json.loads(self.content).get("post_processor") else "Qwen2Tokenizer"
        return str((config or {}).get("tokenizer_class", small))

    def __len__(self) -> int:
        return int(self.backend().get_vocab_size())

    def lacks(self, template: str) -> list[str]:
        """Name the marks of a template that are no tokens here: they would be read as plain text."""
        backend = self.backend()
        marks = [mark for mark in marks_of(template) if not re.match("<[A-Z]", mark)]
        return [mark for mark in marks if backend.token_to_id(mark) is None]

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
            "tokenizer_class": self.tokenizer_class, "pad_token": self.pad, "eos_token": self.pad, "unk_token": None,
            "add_prefix_space": False, "additional_special_tokens": [mark for mark in marks if mark != self.pad],
            **self.settings,
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        vocabulary = json.dumps(model["model"]["vocab"], ensure_ascii=False)
        (folder / "vocab.json").write_text(vocabulary, encoding="utf-8")
        merges = "".join(f"{first} {second}\n" for first, second in model["model"]["merges"])
        (folder / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")


def _chat(before: str, after: str) -> str:
    """Return the chat template that puts these around what a user says; what a system says is in them already."""
    content = "message['content'] if message['content'] is string else message['content'][0]['text']"
    turn = f"{{{{ {json.dumps(before)} + ({content}) + {json.dumps(after)} }}}}"
    return f"{{% for message in messages if message['role'] == 'user' %}}{turn}{{% endfor %}}"


def _between_marks(template: str) -> Iterable[str]:
    """Return what of a template is read as plain text."""
    return filter(None, _MARK.split(template.replace("{}", "")))


def marks_of(template: str) -> Iterable[str]:
    """Return the marks that stand in a template, each once."""
    return dict.fromkeys(_MARK.findall(template))
