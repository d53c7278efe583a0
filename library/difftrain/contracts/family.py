"""What a model family is: maths only. No rank, process group, optimizer or device name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from difftrain.contracts.records import Batch, Bucket, ReferenceArea

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Feature:
    """Describe an encoded feature as a cache stores it.

    Shapes of one sample: with a factor it lies over the picture, (channels, height / factor, width / factor), and with
    frames over the clip, (channels, (F - 1) // frames + 1, height / factor, width / factor) for F frames; with a
    length it is a sequence of tokens, (length, channels); with neither a vector, (channels,).
    per_cell: pixels of the side of a cell, where an encoder of captions reads the picture too: each whole cell adds a
    row to a sequence, (length + (height // per_cell) (width // per_cell), channels), and to a vector, its mask, a place.
    seen: says how many they add where that encoder brings what it sees to a size of its own. Picklable.
    own: of a reference image that is not of its image's size: it lies over a size of its own.
    """

    channels: int
    factor: int = 0
    length: int = 0
    dtype: str = "float32"
    maskable: bool = False
    frames: int = 0
    per_cell: int = 0
    seen: Callable[[Bucket], int] | None = None
    own: ReferenceArea | None = None

    def shape(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of one sample in a bucket."""
        if self.factor:
            lies_over = bucket if self.own is None else self.own.bucket(bucket)
            return _over(lies_over, self.channels, self.factor, self.frames)
        cells = (bucket.height // self.per_cell) * (bucket.width // self.per_cell) if self.per_cell else 0
        cells += self.seen(bucket) if self.seen is not None else 0
        return (self.length + cells, self.channels) if self.length else (self.channels + cells,)


def _over(bucket: Bucket, channels: int, factor: int, frames: int) -> tuple[int, ...]:
    """Return the shape of what lies over a picture, or over a clip whose first frame stands alone."""
    clip = ((bucket.frames - 1) // frames + 1,) if frames else ()
    return (channels, *clip, bucket.height // factor, bucket.width // factor)


@dataclass(frozen=True)
class NoiseMix:
    """Say what is mixed into white noise: an offset per channel, and levels of lower resolution.

    offset_random: the offset's strength is drawn between 0 and `offset`. normalise: the sum of levels is brought back
    to unit deviation; not where more is to be added to it later.
    """

    offset: float = 0.0
    offset_random: bool = False
    iterations: int = 0
    discount: float = 0.3
    normalise: bool = True


@dataclass(frozen=True)
class DrawSpec:
    """Ask for one host draw a sample: normal of a latent shape, an integer in [low, high), uniform in [0, 1), or a
    choice of cells of a picture, factor pixels wide and high: those that stay where `share` of them go, in order.

    through: what a uniform draw becomes, in fp64 on the host, before it is rounded once; growing, so that evaluation
    can ask for its quantiles. Picklable. trains: made in training only; evaluation's batches are without it.
    """

    kind: str  # "normal" | "integer" | "uniform" | "choice"
    channels: int = 0  # normal: shape (channels, height / factor, width / factor), see Feature; 0 = a scalar
    factor: int = 1  # 0: one value a channel
    high: int = 0
    low: int = 0
    mix: NoiseMix | None = None  # normal: not white
    frames: int = 0  # normal: over the clip, as Feature.frames
    through: Callable[[float, Bucket], float] | None = None
    trains: bool = False
    share: float = 0.0  # choice: of the cells that go; one stays at least

    def cells(self, bucket: Bucket) -> int:
        """Return among how many cells a choice is made."""
        return (bucket.height // self.factor) * (bucket.width // self.factor)

    def shape(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of one sample's draw in a bucket; () for a scalar."""
        if self.kind == "choice":
            return (max(1, self.cells(bucket) - round(self.share * self.cells(bucket))),)
        if not self.channels:
            return ()
        if not self.factor:
            return (self.channels, 1, 1)
        return _over(bucket, self.channels, self.factor, self.frames)


@dataclass(frozen=True)
class FeatureSpec:
    """Say what a family needs of the data: encoded features, host draws, and which multiple sizes must keep."""

    features: dict[str, Feature]
    draws: dict[str, DrawSpec]
    size_multiple: int = 8


class _Every(frozenset[str]):
    """Contain every name."""

    def __contains__(self, name: object) -> bool:
        return True


EVERY: Collection[str] = _Every()  # load(deferred=EVERY): every part that can be loaded later
# what loss_sums names so is measured, and no term of the loss: sums over samples too; NaN: not measured this time
METRIC = "metric/"

# captions -> {"input_ids_1": (B, L) int64, ...}; picklable, runs in loader workers
Tokenize = Callable[[list[str]], "dict[str, Tensor]"]


class TrainedWeights(Protocol):
    """The exact values of trained weights, by their names in root, as an engine keeps them."""

    def value(self, name: str) -> Tensor: ...
    def put(self, name: str, value: Tensor) -> None: ...
    def holds(self, name: str) -> bool: ...  # whether it is here, or a part of it
    def gathered(self, name: str, tensor: Tensor) -> Tensor: ...  # all of what `value` gives; collective
    def load(self, tensors: Iterable[tuple[str, Tensor]], model: Mapping[str, Tensor]) -> None: ...  # several values
    def summed(self, values: Tensor) -> Tensor: ...  # over ranks of which each has other weights


@dataclass
class Parts:
    """Hold the modules of a family: root has ALL trained parameters under plain names, frozen the rest.

    A deferred part has no weights (it is on the meta device) until it is loaded, and a placeholder may count for it
    until then: look parts up by name after they are loaded.
    """

    root: nn.Module
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # the architecture, as --init_from_config=FILE.json takes it
    notes: list[str] = field(default_factory=list)  # sentences to print at start: what is frozen, and why
    offloaded: set[str] = field(default_factory=set)  # frozen parts that no step needs: they stay on the host
    deferred: dict[str, Callable[[], None]] = field(
        default_factory=dict
    )  # frozen part -> fills its module, on the host
    on_build: list[Callable[[nn.Module], Any]] = field(
        default_factory=list
    )  # done to the module that replaces a placeholder
    training_only: set[str] = field(default_factory=set)  # frozen parts that neither evaluation nor a picture needs
    base: set[str] = field(
        default_factory=set
    )  # names in root that are held as their source has them: in no checkpoint
    silent: set[str] = field(
        default_factory=set
    )  # names in root that are trained though no output depends on them: their gradient is zeros
    base_fingerprints: dict[str, str] = field(
        default_factory=dict
    )  # part of root that base is of -> fingerprint of its weights
    constrain: Callable[[TrainedWeights], dict[str, Tensor]] | None = (
        None  # brings trained weights back within their bounds after an update; returns what it measured
    )
    load_root: Callable[[], None] | None = None  # reads root's weights, which has none until then; done once

    def fill_root(self) -> None:
        """Read the root's weights where they have waited for the caches to be built. Raises ConfigFault."""
        load, self.load_root = self.load_root, None
        if load is not None:
            load()

    def load(self, name: str) -> None:
        """Give a deferred part its weights, on the host; every other part has them. Raises ConfigFault where they do not fit."""
        if name in self.deferred and not self.is_loaded(name):
            before = self.frozen[name]
            self.deferred[name]()
            if self.frozen[name] is not before:
                for action in self.on_build:
                    action(self.frozen[name])

    def offload(self, name: str) -> None:
        """Bring a frozen part back to the host; a deferred one gives its memory back."""
        self.frozen[name].to("meta" if name in self.deferred else "cpu")

    def is_loaded(self, name: str) -> bool:
        """Tell whether a frozen part has its weights now."""
        return not any(parameter.is_meta for parameter in self.frozen[name].parameters())


Source = Literal["pixels", "caption", "control"]
PIXELS: frozenset[Source] = frozenset({"pixels"})
CAPTION: frozenset[Source] = frozenset({"caption"})
CONTROL: frozenset[Source] = frozenset({"control"})  # a reference image that belongs to the picture
PAIR = PIXELS | CAPTION  # a picture and its caption, read together
EDIT = CONTROL | CAPTION  # reference images and the caption, read together
_READ = (PIXELS, CAPTION, PAIR, CONTROL, EDIT)


def control_name(number: int) -> str:
    """Name a reference image by its number, from 0 on: what its features begin with."""
    return "control" if number == 0 else f"control_{number + 1}"


def image_feature(source: frozenset[Source], reference: int = 0) -> str:
    """Name the feature of a batch that an encoder of images reads. reference: which of the reference images."""
    return f"{control_name(reference)}_pixels" if "control" in source else "pixels"


def reads_both(source: frozenset[Source]) -> bool:
    """Tell whether an encoder reads a caption with an image: its features belong to a record, and to a way of cutting it."""
    return "caption" in source and len(source) > 1


@dataclass(frozen=True)
class Encoder:
    """Turn features of a batch into others that can be kept and read again: online, and for the cache builder.

    source: what of a record is encoded: "pixels", "caption" or both, or "control", the reference image `reference`, from
    0 on; or the first `references` of them with the caption; the batch is of one bucket wherever pixels are.
    features: what comes out, by name. modules: those of Parts.frozen that do the work. settings: all else that decides the outcome, weights aside. encode: of a batch on
    the modules' device; an encoder that draws takes Batch.keys, one for each sample, as keys of its draws.
    fingerprint: hash of settings and weights; where these lie in files it reads them without loading a module, and not
    again where the files are the ones that it has read before.
    inputs: of a caption's tokenised features those that decide the outcome; ones that a tokenizer leaves out are none.
    masks: of a maskable feature its mask, (B, L): rows behind the last one that it keeps are zeros. It is what `encode`
    returns under that name, where a template's head is cut off or a picture takes rows, else the tokenised one.
    """

    source: frozenset[Source]
    features: dict[str, Feature]
    modules: tuple[str, ...]
    settings: str
    encode: Callable[[Batch], dict[str, Tensor]]
    fingerprint: Callable[[], str]
    inputs: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)
    reference: int = 0
    references: int = 1

    def __post_init__(self) -> None:
        if self.source not in _READ:
            known = ", ".join("+".join(sorted(source)) for source in _READ)
            raise ValueError(f"an encoder reads one of {known}; this one {'+'.join(sorted(self.source))}")

    @property
    def reads(self) -> str:
        """Name the feature of a batch that it reads, where that is an image."""
        return image_feature(self.source, self.reference)


@dataclass
class Inputs:
    """One micro batch after encoding and noising, on the device, fp32 where floating.

    Shapes: x_t, target (B, C, [F,] H, W); timestep (B,), int64 steps or fp32 in 0..1000 of a flow, or (B, F) where each
    frame of a clip's latents has a time of its own; weight (B,); mask (B, 1, [1,] H, W) in 0..1. aux_targets:
    what further terms of the loss compare outputs with.
    """

    x_t: Tensor
    timestep: Tensor
    conditions: dict[str, Tensor]
    target: Tensor
    weight: Tensor
    mask: Tensor | None = None
    aux_targets: dict[str, Tensor] = field(default_factory=dict)


# among conditions of a model that is told, while it draws, the time that a step goes to: (B,) in 0..1000
UNTIL = "until"


class Drawer(Protocol):
    """Draw with the modules of a family: what a sampler needs of it, and nothing of a diffusers pipeline.

    scheduler: the model's own, whose configuration samplers are made from. modules: those that take part. unit: pixels
    of which both sides are multiples. walks: the model's own sampler walks sigmas from 1 to 1/n. mu: of tokens and steps,
    where the shift of its times follows both.
    """

    scheduler: Any
    unit: int
    walks: bool
    mu: Callable[[int, int], float] | None
    references: int  # reference images that it draws from, as many as in training
    fps: float  # of clips that it draws

    @property
    def modules(self) -> list[nn.Module]: ...
    @property
    def native_size(self) -> tuple[int, int]: ...  # (height, width) that the training saw, or the model's own
    # of a clip for which somebody asks, or by the training's longest: as many below as it takes; 1: a picture
    def frames_of(self, asked: int | None) -> int: ...
    def latent_shape(self, size_hw: tuple[int, int], frames: int = 1) -> tuple[int, ...]: ...
    # of a reference image of a shape, where a picture of size_hw is drawn
    def reference_size(self, size_hw: tuple[int, int], shape_hw: tuple[int, int]) -> tuple[int, int]: ...
    def tokens(self, size_hw: tuple[int, int], frames: int = 1) -> int: ...
    def conditions(
        self,
        prompts: list[str],
        size_hw: tuple[int, int],
        guidance: float | None = None,
        references: Sequence[Tensor] = (),
        frames: int = 1,
    ) -> dict[str, Tensor]: ...  # guidance: embedded, where the model is told one; references: (B, 3, H, W) uint8 each
    def unconditional(
        self,
        negatives: list[str],
        conditions: dict[str, Tensor],
        size_hw: tuple[int, int],
        guidance: float | None = None,
        references: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]: ...  # negative prompts, or what no text is; conditions: what it is to stand beside
    def predict(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor: ...  # fp32, as x
    # one prediction of two, each as x
    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor: ...
    def decode(self, latents: Tensor) -> Tensor: ...  # (B, C, [F,] h, w) -> (B, 3, [F,] H, W) in 0..1
    def encode(
        self, pixels: Tensor, generator: torch.Generator
    ) -> Tensor: ...  # (B, 3, H, W) uint8 -> latents (B, C, h, w) fp32, drawn from the posterior on the host


@dataclass
class Group:
    """One optimizer parameter group, with names so that its state can be stored by name.

    matrices: names of those that Muon updates; None leaves it to the rule of optim/muon.py.
    """

    name: str
    named_params: list[tuple[str, nn.Parameter]]
    lr: float
    weight_decay: float | None = None
    matrices: frozenset[str] | None = None


@dataclass(frozen=True)
class RunFacts:
    """What only a run knows, for the header of its exports. data: the data set's summary, as reports have it."""

    step: int
    epoch: int
    total_steps: int
    num_epochs: int
    global_batch: int
    started_at: float  # Unix seconds
    session_id: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Carry = dict[str, "Tensor"]


class Chain(Protocol):
    """A root's pass as a row of units, so that every run of them may be on another device: enter, units, leave.

    Tensors go from unit to unit by name. layout: what all micro batches of a shape share (sizes, positions, which names
    there are); small and picklable, made where inputs enter. Units are counted from 0; their modules may be missing
    where only others are run.
    """

    units: list[str]  # their names in the root, in the order in which they run

    def owner(self, name: str) -> int: ...  # unit that uses a weight; -1: enter, len(units): leave
    def kind(self, batch: Batch) -> Any: ...  # what beside its shapes decides the layout of a batch; hashable
    def enter(self, inputs: Inputs) -> tuple[Carry, Any]: ...  # and the layout
    def names(self, layout: Any, number: int) -> list[str]: ...  # of what arrives at a unit, in one order everywhere
    def unit(self, number: int, carry: Carry, layout: Any) -> Carry: ...
    def leave(self, carry: Carry, layout: Any) -> tuple[Tensor, ...]: ...  # as `forward` returns it


class Family(Protocol):
    """Own the maths of one model family. Made from the resolved configuration."""

    name: str

    @property
    def features(self) -> FeatureSpec: ...
    def load(
        self, *, meta: bool = False, deferred: Collection[str] = ()
    ) -> Parts: ...  # deferred: of the frozen parts, or EVERY
    def missing_tokenizers(self) -> dict[str, str]: ...  # field of a part that the weights lack -> its id on a hub
    def tokenizer(self, parts: Parts) -> Tokenize: ...
    def encoders(self, parts: Parts) -> dict[str, Encoder]: ...  # by what a configuration may ask to be cached
    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]: ...
    def chain(self, root: nn.Module) -> Chain: ...  # made of a whole root
    def repeated(self, parts: Parts) -> list[nn.Module]: ...  # the small blocks alike, for regional compile
    def latents(self, batch: Batch, parts: Parts) -> Tensor: ...
    # latents of reference images, by control_name, as the denoiser takes them
    def references(self, batch: Batch, parts: Parts) -> dict[str, Tensor]: ...
    def inputs(self, batch: Batch, parts: Parts) -> Inputs: ...
    def forward(self, root: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]: ...
    def loss_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]: ...
    def param_groups(self, root: nn.Module) -> list[Group]: ...
    def stream(self, parts: Parts) -> Iterator[tuple[str, Tensor]]: ...  # straight from the source; parts may be meta
    def export(
        self,
        weights: Iterable[tuple[str, Tensor]],  # the root's, by plain name
        parts: Parts,
        layout: str,  # ckpt | safetensors | diffusers | diffusers_safetensors
        path: Path,  # without a suffix: the layout decides; returns what was written
        *,
        dtype: torch.dtype | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Path: ...
    def metadata(self, title: str, saved_at: float, facts: RunFacts | None = None) -> dict[str, str]: ...
    def drawer(
        self, parts: Parts, predict: Callable[[Inputs], Tensor] | None = None
    ) -> Drawer: ...  # over the very modules of parts; predict: calls the denoiser where the root is not whole
    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float: ...


WeightStream = Iterator[tuple[str, "Tensor"]]
