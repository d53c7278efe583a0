"""Arguments that users give as key=value, checked against what the class takes."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from difftrain.config.hidden_imports import let_in
from difftrain.contracts import ConfigFault, Fault

T = TypeVar("T")


def parse(where: str, pairs: Iterable[str]) -> dict[str, Any]:
    """Read key=value pairs whose values are Python literals. Raises ConfigFault with every bad pair."""
    arguments: dict[str, Any] = {}
    faults: list[Fault] = []
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            faults.append(Fault(where, f"got {pair!r}", "write name=value, as in weight_decay=0.01"))
            continue
        if name in arguments:
            faults.append(Fault(where, f"{name} is given twice", "give it once"))
        try:
            arguments[name] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            faults.append(
                Fault(where, f"{name}={text} is not a literal", "a number, True, None, (1, 2), or text in quotes")
            )
    if faults:
        raise ConfigFault(faults)
    return arguments


def check(where: str, what: str, taker: Callable[..., Any], arguments: Iterable[str], own: Iterable[str]) -> None:
    """Raise ConfigFault for names that `taker` does not take, or that we set ourselves (`own`)."""
    parameters = inspect.signature(taker).parameters.values()
    own = set(own)
    accepted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - own - {"self"}
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
    wrong = [name for name in arguments if name in own or (name not in accepted and not anything)]
    if wrong:
        names = ", ".join(sorted(accepted)) or "nothing"
        raise ConfigFault([Fault(where, f"{what} takes no {', '.join(wrong)} here", f"it takes {names}")])


def load(where: str, path: str, base: type[T]) -> type[T]:
    """Import package.module.Class. Raises ConfigFault where it is missing or not what `base` says."""
    module_name, _, name = path.rpartition(".")
    let_in(module_name)
    try:
        value = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigFault(
            [Fault(where, f"{path} cannot be imported: {error}", "install it, or check the name")]
        ) from error
    except AttributeError as error:
        raise ConfigFault([Fault(where, f"{module_name} has no {name}", "check the name")]) from error
    if not (inspect.isclass(value) and issubclass(value, base)):
        raise ConfigFault(
            [Fault(where, f"{path} is not of the class {base.__name__}", f"name a subclass of {base.__name__}")]
        )
    return value
