"""Which layers of a network get an adapter, the names that weights have from then on, and what they begin as.

peft puts a layer of its own in the place of the network's, which becomes `base_layer` inside it: `to_q.weight` is then
`to_q.base_layer.weight`, beside `to_q.lora_A.default.weight`. Files and messages have the plain names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.adapters.kinds import AdapterKind, LayerRanks, kind_of, library
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Fault
from difftrain.diffusion.draws import key_of, normal

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config.schema.adapter import AdapterSection

ADAPTER = "default"  # peft's name of the only one
_INSIDE = re.compile(r"\.(lora_|lokr_|oft_|ia3_)")
_BASE = ".base_layer."


# --- names


def is_adapter(name: str) -> bool:
    """Tell whether a parameter belongs to an adapter."""
    return _INSIDE.search(name) is not None


def plain_name(name: str) -> str:
    """Return the name that a weight has in the network without adapters."""
    return name.replace(_BASE, ".")


def inside_name(name: str, layers: Collection[str]) -> str:
    """Return the name that a weight of the network has beside adapters in these layers."""
    owner, _, leaf = name.rpartition(".")
    return f"{owner}{_BASE}{leaf}" if owner in layers else name


def adapted_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a network that have an adapter, as peft put them there."""
    return {name: layer for name, layer in net.named_modules() if hasattr(layer, "base_layer")}


# --- which layers


def matches(layer: str, words: Sequence[str]) -> str | None:
    """Return the first word that means a layer: its name, the end of it, or a regular expression of the whole."""
    return next((word for word in words if f".{layer}".endswith(f".{word}") or re.fullmatch(word, layer)), None)


def chosen_layers(
    net: nn.Module, section: AdapterSection, default: Sequence[str], blocks: Sequence[str], unread: Collection[str] = ()
) -> list[str]:
    """Name the layers that get an adapter, in order.

    default: words of the family's layers, inside its lists of blocks. unread: weights that no loss reaches.
    """
    chosen = []
    for name in _layers(net, kind_of(section)):
        inside = not blocks or any(name.startswith(f"{block}.") for block in blocks)
        wanted = matches(name, section.target_modules) if section.target_modules else inside and matches(name, default)
        if wanted and not matches(name, section.exclude_modules) and f"{name}.weight" not in unread:
            chosen.append(name)
    return chosen


def _layers(net: nn.Module, kind: AdapterKind) -> list[str]:
    kinds = (nn.Linear, nn.Conv2d) if kind.convolutions else (nn.Linear,)
    return [name for name, layer in net.named_modules() if isinstance(layer, kinds)]


def ranks_of(section: AdapterSection, layers: Sequence[str]) -> LayerRanks:
    """Return rank and alpha of every layer; an alpha that nobody gives is the rank."""
    rank, alpha = {}, {}
    for name in layers:
        word = matches(name, list(section.rank_pattern))
        rank[name] = section.rank if word is None else section.rank_pattern[word]
        word = matches(name, list(section.alpha_pattern))
        own = section.alpha if word is None else section.alpha_pattern[word]
        alpha[name] = float(rank[name] if own is None else own)
    return LayerRanks(rank, alpha)


def target_faults(
    net: nn.Module, section: AdapterSection, layers: Sequence[str], part: str, others: Sequence[str] = ()
) -> list[Fault]:
    """Find words that mean no layer, and ranks that a layer has not. net: without weights; others: layers of other parts."""
    kind, problems = kind_of(section), list[Fault]()
    known = _layers(net, kind)

    # --- words that mean no layer
    for field in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        among = [*(known if field.endswith("modules") else layers), *others]
        for word in getattr(section, field):
            if not any(matches(name, [word]) for name in among):
                problems.append(
                    Fault(option(f"adapter.{field}"), f"{word!r} is no layer of the {part}", _near(word, known))
                )
    if not layers and not problems:
        what = f"no layer of the {part} is left"
        problems.append(Fault(option("adapter.exclude_modules"), what, "leave some layers in"))

    # --- ranks that a layer has not
    modules = dict(net.named_modules())
    for name, rank in ranks_of(section, layers).rank.items():
        weight: Any = modules[name].weight
        rows, columns = weight.shape[0], weight[0].numel()
        where, matrix = option("adapter.rank"), f"{name} is a matrix of {rows} x {columns}"
        if kind.bounded and rank > min(rows, columns):
            problems.append(Fault(where, f"is {rank}, and {matrix}", f"at most {min(rows, columns)} there"))
            break
        if kind.divides and columns % rank:
            what = f"is {rank}, which does not divide the {columns} inputs of {name}"
            problems.append(Fault(where, what, "blocks are all of one size"))
            break
    return problems


def _near(word: str, known: Sequence[str]) -> str:
    """Name layers whose names are like a word."""
    ends = dict.fromkeys(re.sub(r"^.*\.\d+\.", "", name) for name in known)
    near = difflib.get_close_matches(word.rpartition(".")[2], ends, 3, 0.4) or list(ends)[:3]
    return f"such as {', '.join(near)}"


# --- put in, and filled


def put_in(net: nn.Module, section: AdapterSection, layers: Sequence[str], *, autocast: bool) -> None:
    """Put an adapter into layers of a network that has no weights yet; it has none, either.

    autocast: the step chooses the dtype of every layer itself.
    """
    kind = kind_of(section)
    if not layers:
        return
    grads = {name: param.requires_grad for name, param in net.named_parameters()}
    config = kind.config(section, ranks_of(section, layers))
    library().inject_adapter_in_model(config, net, ADAPTER, low_cpu_mem_usage=True)
    for name, param in net.named_parameters():  # peft freezes all else
        param.requires_grad_(is_adapter(name) or grads.get(plain_name(name), False))
    for layer in adapted_layers(net).values():
        if autocast and hasattr(layer, "cast_input_dtype_enabled"):
            vars(layer)["cast_input_dtype_enabled"] = False


@torch.no_grad()
def initial_values(net: nn.Module, section: AdapterSection, part: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what adapters begin as, in fp32, by (seed, part, name) alone; the layers' own weights are there by then.

    What is drawn has the variance 1 / (3 fan_in), that of torch's default for linear layers.
    """
    kind = kind_of(section)
    for name, param in list(net.named_parameters()):
        if not is_adapter(name):
            continue
        if re.search(kind.zeros, name):
            yield name, torch.zeros(param.shape)
        elif re.search(kind.ones, name):
            yield name, torch.ones(param.shape)
        elif re.search(kind.lengths, name):
            owner = name.partition(".lora_")[0]
            weight: Any = net.get_submodule(owner).base_layer.weight  # type: ignore[union-attr]
            yield name, _lengths(weight.detach(), param.shape)
        else:
            draw = torch.from_numpy(normal(seed, key_of("initial weights", f"{part}.{name}"), 0, "init", param.shape))
            yield name, draw.mul_((3 * param[0].numel()) ** -0.5)


def _lengths(weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the lengths of a weight's rows, by which DoRA begins."""
    return torch.linalg.vector_norm(weight.float().flatten(1), dim=1).reshape(shape)
