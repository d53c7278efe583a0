"""What a family says of itself as data. Nothing here imports torch: messages, docs and loading read the same facts.

The row of a family (models/registry.py) names its parts; its class holds these facts and the maths of its denoiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Sizes = Mapping[str, Mapping[str, Any]]  # part -> its constructor's arguments, defaults included


@dataclass(frozen=True)
class Text:
    """One text encoder: from a caption to hidden states, to a vector, or to both.

    part: its name among the family's parts. tokenizer: folder of diffusers' layout. length: tokens that are kept; of
    CLIP's no more than it has positions, which may be more than it reads.
    hidden: which of hidden_states is read; "last": the output, behind the last norm; None: none.
    layers: several hidden states side by side, in place of one. pooled: the field of the output with the vector.
    template: around the caption, which stands for "{}"; blank: what stands in it for an empty caption; bare: around no caption, and around a negative prompt, where
    that is another. drop: tokens of the template's head that are cut off what comes out. masked: tokens are masked up to
    their end. reads_mask: the encoder is given that mask. zeros: rows of padding become zeros. passes_mask: the denoiser is given the mask of what comes out.
    pads_left: of a language model: texts are filled up in front. marked: its template has all marks, so its tokenizer adds
    none. pads_end: of a language model: texts are filled up with the token that ends them. strips: what is taken out of
    captions, because it would be read as a mark.
    quoted: of T5: it reads what a caption quotes, and nothing where it quotes nothing. raw_bytes: of T5: its tokens are bytes.
    normed: of CLIP: the encoder's last norm is put behind a hidden state that is read by number.
    pads_zero: of CLIP: texts are filled up with id 0, as OpenCLIP does, in place of the end's.
    mask: its name among features; pooled_as: the vector's; empty: by the encoder's place, mask_1 and pooled_1.
    mends: of T5: captions are mended before they are read, as CLIP's always are.
    picture: of a language model that sees reference images: what stands before the caption for each of them, its number,
    from 1 on, in the place of "{}". area: pixels that each is brought to before it is seen.
    hub: a repository that has the vocabulary, for weights that come without it.
    """

    part: str
    tokenizer: str
    kind: Literal["clip", "t5", "llm"]
    length: int
    hidden: int | Literal["last"] | None = "last"
    layers: tuple[int, ...] = ()
    pooled: str | None = None
    template: str = "{}"
    blank: str = ""
    bare: str = ""
    drop: int = 0
    masked: bool = False
    reads_mask: bool = True
    zeros: bool = True
    passes_mask: bool = False
    pads_left: bool = False
    marked: bool = False
    pads_end: bool = False
    strips: tuple[str, ...] = ()
    quoted: bool = False
    raw_bytes: bool = False
    normed: bool = False
    pads_zero: bool = False
    mends: bool = False
    picture: str = ""
    area: int = 0
    mask: str = ""
    pooled_as: str = ""
    hub: str = ""

    def showing(self, count: int) -> Text:
        """Return it with so many reference images in its template."""
        pictures = "".join(self.picture.format(number) for number in range(1, count + 1))
        return replace(self, template=self.template.replace("{}", pictures + "{}"))


@dataclass(frozen=True)
class OneFile:
    """A single file with all parts of a model in their original layout.

    prefixes: part -> what stands before the names of its tensors. released: the shipped size of a file that says none;
    others: further ones that every reader knows by heart.
    beside: tensors that such files have and no part reads; ignored: pattern of what trainers and mergers leave there.
    layout: what such a file is known by, for messages. spare: pattern of the keys of numbered blocks of which such files
    have one more than the model, that nothing reads. optional: parts that a file may lack, which then come from elsewhere.
    identity: matrices that a file may lack, and readers take as the identity. shift: that every reader draws with.
    """

    prefixes: Mapping[str, str]
    released: str
    layout: str
    beside: tuple[str, ...] = ()
    ignored: str = "$^"
    spare: str = ""
    optional: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    shift: float | None = None


@dataclass(frozen=True)
class StepShift:
    """Say mu by image tokens and by the number of steps: on a line in the steps between two lines in the tokens.

    few, many: (steps, rise, mu of no tokens) of a line. tokens: above these that of many steps holds for any number.
    """

    few: tuple[int, float, float]
    many: tuple[int, float, float]
    tokens: int

    def __call__(self, tokens: int, steps: int) -> float:
        """Return mu of a picture of so many tokens that is walked to in so many steps."""
        low, high = (rise * tokens + start for _, rise, start in (self.few, self.many))
        if tokens > self.tokens:
            return high
        slope = (high - low) / (self.many[0] - self.few[0])
        return slope * steps + (high - self.many[0] * slope)


@dataclass(frozen=True)
class AreaShift:
    """Let s follow the root of the number of image tokens, whatever the number of steps. unit: tokens on a side where s is 1."""

    unit: float

    def __call__(self, tokens: int, steps: int) -> float:
        """Return mu, the logarithm of s, of a picture of so many tokens."""
        return math.log(math.sqrt(tokens) / self.unit)


@dataclass(frozen=True)
class Shift:
    """How a sampler shifts the times of a flow, t <- s t / (1 + (s - 1) t), where the weights' folder does not say it.

    dynamic: (first, last tokens, low, high mu): s = e^mu with mu linear in the number of image tokens.
    mu: what it follows in place of that, by (image tokens, steps); the rest of dynamic is what folders say.
    terminal: the last time that is walked to, stretched to it. walks: its pipeline walks from 1 to 1/n; else the
    scheduler chooses its own times.
    """

    s: float = 1.0
    dynamic: tuple[int, int, float, float] | None = None
    mu: StepShift | AreaShift | None = None
    terminal: float | None = None
    walks: bool = True


@dataclass(frozen=True)
class Lora:
    """Where adapters go by default: leaves of the names of linear layers inside the blocks.

    comfy: prefix of ComfyUI's keys. original: these are spelt as in the original layout, else as in diffusers'.
    layers: a table of ComfyUI's names (see weights/keys.py), for a family whose original layout has no table.
    kohya: whose names of layers kohya's scripts spell with underscores: "diffusers", "original"; none: they have no such
    family of UNets.
    """

    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    comfy: str = "diffusion_model."
    original: bool = True
    layers: str = ""
    kohya: Literal["", "diffusers", "original"] = ""


@dataclass(frozen=True)
class Expert:
    """One of several denoisers of a model, which is trained by itself. folder: where it lies. low, high: of its times."""

    folder: str
    low: float
    high: float

    def about(self) -> str:
        """Return what is to be said of a run that trains it."""
        return (
            f"the expert of times {self.low} to {self.high} is trained ({self.folder}); samples are drawn by it alone"
        )


@dataclass(frozen=True)
class FamilyOption:
    """A setting that few families know. field: of the configuration. meaning: one line for docs and messages."""

    field: str
    meaning: str


@dataclass(frozen=True)
class Agree:
    """What must hold between parts before a weight is read. where: "part.argument". must: what it has to be, by sizes."""

    where: str
    must: Callable[[Sizes], Any]
    why: str

    def misfit(self, sizes: Sizes) -> tuple[str, str, str] | None:
        """Return (place, what, remedy) where the sizes do not agree."""
        part, _, argument = self.where.partition(".")
        value, right = sizes[part].get(argument), self.must(sizes)
        return (
            None
            if _plain(value) == _plain(right)
            else (f"[{part}] {argument}", f"is {value}, must be {right}", self.why)
        )


@dataclass(frozen=True)
class Bound:
    """What must not be. where: "part.argument". wrong: says what is wrong, by sizes; nothing where it is right.

    why: with "{part[argument]}" where a size stands.
    """

    where: str
    wrong: Callable[[Sizes], str]
    why: str

    def misfit(self, sizes: Sizes) -> tuple[str, str, str] | None:
        """Return (place, what, remedy) where a bound is broken."""
        part, _, argument = self.where.partition(".")
        what = self.wrong(sizes)
        return (f"[{part}] {argument}", what, self.why.format(**sizes)) if what else None


def clip_bounds(part: str) -> tuple[Bound, ...]:
    """Say what no CLIP text encoder may be."""

    def heads(sizes: Sizes) -> str:
        width = sizes[part]["hidden_size"]
        return f"is {width}" if width % sizes[part]["num_attention_heads"] else ""

    def positions(sizes: Sizes) -> str:
        number = sizes[part]["max_position_embeddings"]
        return "" if number >= 3 else f"is {number}"

    why = "a sequence has a start token, an end token and at least one token between them"
    multiple = f"a multiple of num_attention_heads {{{part}[num_attention_heads]}}"
    return Bound(f"{part}.hidden_size", heads, multiple), Bound(f"{part}.max_position_embeddings", positions, why)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
