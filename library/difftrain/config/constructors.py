"""What an optimizer's constructor takes, read from its source without importing it.

inspect.signature would say the same in fewer lines, of what is imported: torch, and bitsandbytes, torch_npu or a user's
own package, which look for devices while they are imported. A configuration fault is to be answered together with all
others, within half a second, before any device is touched, and where the package is not installed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.config.schema import names
from difftrain.config.schema.rates import ADAFACTOR, argument, is_schedule_free, schedule_name
from difftrain.config.schema.sections import OptimizerSection
from difftrain.config.schema.validate import show

_DEPTH = 8  # of names that one module has from another


class Signature(NamedTuple):
    """Names of arguments with their defaults: None also for what is no literal. anything: further ones are taken too."""

    positional: dict[str, Any]
    by_name: dict[str, Any]  # those that are given by name alone
    anything: bool


@cache
def signature(path: str) -> Signature | None:
    """Return the arguments of package.module.name, without self; None where its source does not tell."""
    module, _, name = path.rpartition(".")
    definition = _defined(module, name, _DEPTH)
    return definition and _signature(*definition, _DEPTH)


def _signature(module: str, node: ast.stmt, depth: int) -> Signature | None:
    if isinstance(node, ast.FunctionDef):
        return _of(node.args, ())
    if not isinstance(node, ast.ClassDef) or not depth:
        return None
    own = next(
        (method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"), None
    )
    if own is not None:
        return _of(own.args, (own.args.posonlyargs + own.args.args)[:1])
    for base in node.bases:  # the first that says something
        if isinstance(base, ast.Name) and (definition := _defined(module, base.id, depth - 1)):
            return _signature(*definition, depth - 1)
    return None


def _of(args: ast.arguments, without: tuple[ast.arg, ...] | list[ast.arg]) -> Signature:
    ordered = args.posonlyargs + args.args
    first = [None] * (len(ordered) - len(args.defaults))
    positional = {
        arg.arg: _literal(default) for arg, default in zip(ordered, [*first, *args.defaults]) if arg not in without
    }
    by_name = {arg.arg: _literal(default) for arg, default in zip(args.kwonlyargs, args.kw_defaults)}
    return Signature(positional, by_name, args.kwarg is not None)


def _literal(node: ast.expr | None) -> Any:
    try:
        return node and ast.literal_eval(node)
    except ValueError:
        return None


def _defined(module: str, name: str, depth: int) -> tuple[str, ast.stmt] | None:
    """Return the statement that defines a name, and its module, through all modules that hand it on."""
    file = _file(module)
    if file is None or not depth:
        return None
    statements = list(_statements(_tree(file).body))
    for statement in reversed(statements):  # the last one counts
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return module, statement
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if name == (alias.asname or alias.name) or alias.name == "*":
                other = _absolute(module, file, statement)
                definition = _defined(other, name if alias.name == "*" else alias.name, depth - 1)
                if definition is not None or alias.name != "*":
                    return definition
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those within if and try too: what is there in some case."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)


def _absolute(module: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts if file.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


@cache
def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _file(module: str) -> Path | None:
    """Return a module's source, looked for as the import system would, but for what is imported."""
    first, *remaining = module.split(".")
    try:
        spec = PathFinder.find_spec(first) if first else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not remaining:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        location = Path(folder, *remaining)
        for file in (location / "__init__.py", location.with_name(f"{location.name}.py")):
            if file.is_file():
                return file
    return None


NPU_FUSED_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
_OURS = ("params", "lr")
_TORCH = "torch.optim"
_EXPERIMENTAL = {"DAdaptation": "DAdaptAdamPreprint", "DAdaptAdamPreprint": "", "DAdaptAdanIP": ""}
# optimizer -> its class, and what is not the user's beside params and lr
_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (f"{_TORCH}.{name}", ()) for name in names.TORCH_OPTIMIZERS},
    **{name: (f"bitsandbytes.optim.{name}", ()) for name in names.EIGHT_BIT},
    **{name: (f"dadaptation.{name}", ()) for name in names.D_ADAPTATION},
    **{name: (f"dadaptation.experimental.{other or name}", ()) for name, other in _EXPERIMENTAL.items()},
    **{name: (f"schedulefree.{name}", ()) for name in names.SCHEDULE_FREE},
    "AdamW": (f"{_TORCH}.AdamW", ()),
    "oss": (f"{_TORCH}.AdamW", ()),
    "SGDNesterov": (f"{_TORCH}.SGD", ("nesterov",)),
    "SGDNesterov8bit": ("bitsandbytes.optim.SGD8bit", ("nesterov",)),
    "Lion": ("lion_pytorch.Lion", ()),
    "Prodigy": ("prodigyopt.Prodigy", ()),
    "Adafactor": ("transformers.optimization.Adafactor", ()),
    "Muon": ("difftrain.optim.muon.Muon", ("fused",)),
    "GenericOptim": ("difftrain.optim.generic.GenericOptim", ()),
    "Automagic": ("difftrain.optim.automagic.Automagic", ()),
    "AdamW8bitKahan": ("difftrain.optim.adamw_8bit_kahan.AdamW8bitKahan", ()),
}
Taken = Mapping[str, Any] | None  # names with their defaults; None: that cannot be told from here
Wrong = tuple[str, str]  # what is wrong, and what would be right


def optimizer_takes(name: str) -> Taken:
    """Return the arguments that an optimizer may be given."""
    if names.proper(name, names.ASCEND):
        return NPU_FUSED_ADAMW
    known = names.proper(name, _CLASSES)
    if not known:  # of whose defaults nothing is known but that they are there
        taken = _takes(name, _OURS)
        return taken and dict.fromkeys(taken)
    path, own = _CLASSES[known]
    return _takes(path, (*_OURS, *own))


def schedule_takes(section: OptimizerSection) -> Taken:
    """Return the arguments that the schedule which counts may be given beside its own fields."""
    if section.scheduler_type and not is_schedule_free(section):
        path = section.scheduler_type
        return _takes(path if "." in path else f"{_TORCH}.lr_scheduler.{path}", ("optimizer", "last_epoch"))
    name = schedule_name(section)
    known = signature(f"difftrain.optim.schedule.{name}") if name in names.SCHEDULERS and name != ADAFACTOR else None
    return known and known.by_name


def wrong_argument(what: str, name: str, value: Any, taken: Taken, others: Iterable[str] = ()) -> Wrong | None:
    """Say what is wrong with an argument of something, or nothing. others: keys that may have been meant."""
    if taken is None:
        return None
    if name not in taken:
        known = ", ".join(sorted(taken)) or "none"
        return f"{what} takes no {name}", names.did_you_mean(name, (*taken, *others)) or f"its arguments are {known}"
    usual = taken[name]
    if _are_numbers(usual) and not (_are_numbers(value) and len(value) == len(usual)):
        return f"{what}'s {name} must be {len(usual)} numbers, got {show(value)}", f"as in {list(usual)}"
    if isinstance(usual, bool) and value not in (True, False, None):
        return f"{what}'s {name} must be true or false, got {show(value)}", ""
    if _is_number(usual) and not (value is None or isinstance(value, bool) or _is_number(value)):
        return f"{what}'s {name} must be a number, got {show(value)}", f"as in {show(usual)}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def wrong_arguments(section: OptimizerSection) -> Iterator[tuple[str, str, str]]:
    """Find arguments that nothing takes: (field, what is wrong, what would be right)."""
    sources = [("args", section.type, section.args, optimizer_takes(section.type))]
    if not is_schedule_free(section):
        schedule = section.scheduler_type or section.scheduler
        sources.append(("scheduler_args", schedule, section.scheduler_args, schedule_takes(section)))
        if section.schedulefree_wrapper:
            taken = _takes("difftrain.optim.schedule_free.ScheduleFree", ("base",))
            sources.append(("schedulefree_wrapper_args", "the wrapper", section.schedulefree_wrapper_args, taken))
    for field, what, words, taken in sources:
        for name in dict.fromkeys(word.partition("=")[0].strip() for word in words):
            value = argument(words, name, _UNREAD)
            if value is not _UNREAD and (wrong := wrong_argument(what, name, value, taken)):
                yield f"optimizer.{field}", *wrong


_UNREAD = object()  # what is no literal is another rule's matter


def _takes(path: str, own: Collection[str]) -> Taken:
    parameters = signature(path)
    if parameters is None or parameters.anything:
        return None
    return {name: usual for name, usual in {**parameters.positional, **parameters.by_name}.items() if name not in own}
