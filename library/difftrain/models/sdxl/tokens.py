"""From captions to the two token sequences of SDXL, 77 long or in chunks of 75."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.clip_tokens import CHUNK, PAD_1, PAD_2, ClipTokenize, chunks_of
from difftrain.models.parts.clip_vocabulary import ClipVocabulary
from difftrain.models.parts.small_vocabulary import MAX_BUILT_IN, clip_misfits, clip_vocabulary

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.models.sdxl.sources import Source

__all__ = ["CHUNK", "PAD_1", "PAD_2", "SDXLTokenize", "chunks_of", "comes_without", "vocabularies"]

HUB_IDS = ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k")  # kohya's


def vocabularies(cfg: TrainConfig, source: Source) -> tuple[ClipVocabulary, ClipVocabulary]:
    """Read both vocabularies: --tokenizer1_path and 2, else the folder's own, else the built-in of the small sizes.

    Raises ConfigFault that says what to place where; the padding rule is the encoder's, whatever files say.
    """
    sizes = (source.architecture.text_encoder_1, source.architecture.text_encoder_2)
    given = (cfg.model.tokenizer1, cfg.model.tokenizer2)
    beside = source.tokenizer_dirs or (None, None)
    faults: list[Fault] = []
    pair = []
    for i, (size, path, pad) in enumerate(zip(sizes, given, (PAD_1, PAD_2))):
        flag = f"--tokenizer{i + 1}_path"
        try:
            vocabulary = clip_vocabulary(Path(path).expanduser() if path else beside[i], size["vocab_size"], pad)
            faults += clip_misfits(flag, vocabulary, size)
            pair.append(vocabulary)
        except (OSError, ValueError, KeyError) as error:
            faults.append(Fault(flag, str(error), _REMEDY))
    if faults:
        raise ConfigFault(faults)
    return pair[0], pair[1]


_REMEDY = (
    "give a folder with CLIP's vocab.json and merges.txt (tokenizer and tokenizer_2 of any SDXL folder of diffusers), "
    "one with tokenizer.json, or OpenAI's file bpe_simple_vocab_16e6.txt.gz"
)


def comes_without(cfg: TrainConfig, source: Source) -> dict[str, str]:
    """Name the vocabularies that are neither given nor beside the weights nor built in, and the hub ids that have them."""
    sizes = (source.architecture.text_encoder_1, source.architecture.text_encoder_2)
    given = (cfg.model.tokenizer1, cfg.model.tokenizer2)
    if source.tokenizer_dirs:
        return {}
    return {
        f"model.tokenizer{i}": HUB_IDS[i - 1]
        for i, (size, path) in enumerate(zip(sizes, given), start=1)
        if not path and size["vocab_size"] > MAX_BUILT_IN
    }


class SDXLTokenize(ClipTokenize):
    """Turn captions into {"input_ids_1", "input_ids_2"}, each (B, N, 77): SDXL's two encoders read the same kind."""
