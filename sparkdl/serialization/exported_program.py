"""A module as an exported program, which is read without running code from its file.

``torch.export`` turns a forward pass into a graph of operators. Its file format is not safe to
load as it is. What torch 2.13 does when it reads a ``.pt2`` archive:

- sample inputs, tensor subclasses, custom objects and the files of older formats go through
  ``torch.load(weights_only=False)`` or ``pickle.loads`` (``export/pt2_archive/_package.py``);
- sizes such as ``2*s0`` go through ``sympy.sympify``, which calls ``eval``; ``guards_code`` is
  Python source for ``exec``; operator names are looked up with ``getattr`` from ``torch``; node
  names become Python source (``_export/serde/serialize.py``, ``export/_unlift.py``);
- ``torch.export.load`` retries with another zip parser and the older format after an error;
- compiled libraries in ``aotinductor/`` are loaded.

So `write_program` stores none of these, and `read_program` refuses archives with anything else
than raw tensors, operators of a list, plain names and plain size expressions, before torch reads
them. The list is `allowed_operators.ALLOWED`: other operators of ATen write or read outside their
tensors where their arguments are wrong, and those of other libraries may do anything.
It looks through torch's own zip reader, so that both see the same bytes, and calls ``load_pt2``
itself, which has no second try. Both are imported where they are needed: they bring torch's
compiler, which takes a second. What it imports when a program ends makes Python forget that Ctrl-C
has ended the program, so that its status would be 1.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdl.errors import ConfigError, StorageError
from sparkdl.serialization.allowed_operators import (
    ALLOWED,
    CHECKED,
    UNCHECKED,
    has_tensors,
    strange_constant,
)
from sparkdl.serialization.example_inputs import Given, InputExample, as_example
from sparkdl.serialization.trust import USUAL, Trust
from sparkdl.sync.frozen_layers import evaluation_mode

if TYPE_CHECKING:
    from torch.export.pt2_archive import PT2ArchiveReader

_TRACERS = ("torch.fx.experimental.symbolic_shapes", "torch._guards", "torch.export._trace")
"""Loggers of what torch's tracers could not do, which the error says."""
_MODEL = "models/model.json"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_ENTRY = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|models/model\.json|data/sample_inputs/model\.pt"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)
_NAME = re.compile(r"[\w.+-]*")
_OPERATOR = re.compile(r"(torch\.ops\.(?P<name>\w+\.\w+))\.(?P<overload>\w+)")
_OTHER_OPERATOR = re.compile(
    r"torch\.ops\.higher_order\.(cond|map_impl|scan|associative_scan|while_loop"
    r"|wrap_with_(set_grad_enabled|autocast))"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_"
    r"|not_|getitem)"
    r"|math\.(ceil|floor|trunc|sqrt|pow)|torch\.sym_(int|float|ite|max|min|not|sqrt|sum)"
)
"""Operators of control flow and sizes. Others call what an attribute or a library's path names."""
_EXPRESSION = re.compile(r"(?:\d+\.\d+|'\w+'|\w+|[\s(),=+*/<>!-])*+")
"""Without a second try, which would take a time that doubles with each letter."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_SYMBOL = re.compile(r"[a-z]{1,3}\d+")
_FUNCTIONS = re.compile(
    r"Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Abs|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv"
    r"|ModularIndexing|Where|IntTrueDiv|FloatTrueDiv|PowByNatural|FloatPow|ToFloat|TruncToInt"
    r"|TruncToFloat|CeilToInt|FloorToInt|RoundToInt|LShift|RShift|Identity|Eq|Ne|Lt|Le|Gt|Ge|And|Or"
    r"|Not|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|True|False"
    r"|positive|negative|nonnegative|nonpositive|integer|real|finite|zero|precision|oo|int_oo"
)
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
_MOST_POWER = 64
"""The greatest exponent of a size."""
_MOST_POWERS = 2
"""So many powers may be within each other."""
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


logger = logging.getLogger(__name__)


class ProgramModule(nn.Module):
    """An exported program as a module that can only predict. Can be copied and pickled.

    Attributes:
        archive: the file that `read_program` reads.
        trust: what it may hold besides, see `read_program`.
        has_layers: false: nobody calls the parts of a program one by one.
    """

    has_layers = False

    def __init__(self, archive: bytes, trust: Trust = USUAL) -> None:
        """Read an archive; StorageError if it holds what could run code, or other operators."""
        super().__init__()
        _check_archive(archive, trust)
        self.archive = archive
        self.trust = trust
        # Guards are Python source from the file; the operators check the shapes themselves.
        self.program = self.exported().module(check_guards=False)
        for part in self.program.modules():
            if isinstance(part, torch.fx.GraphModule):
                _check_calls(part)
        for part in self.modules():  # torch's own eval() refuses exported programs
            part.training = False

    def exported(self) -> torch.export.ExportedProgram:
        """The program as torch's exporters take it, read anew."""
        from torch.export.pt2_archive._package import load_pt2

        program: torch.export.ExportedProgram
        program = load_pt2(io.BytesIO(self.archive)).exported_programs["model"]
        return program

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Run the program on a batch of any size."""
        return self.program(*inputs, **named)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The weights, by their names in the module that was exported."""
        return self.program.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Take weights that have these names."""
        return self.program.load_state_dict(*args, **options)

    def train(self, mode: bool = True) -> ProgramModule:
        """Stay in evaluation mode; ConfigError if training mode was asked for."""
        if mode:
            raise ConfigError(
                "an exported program can only predict; train the module that it was made from, to "
                "which initialWeights gives the weights of the saved model"
            )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return read_program, (self.archive, self.trust)


def write_program(module: nn.Module, example_inputs: Given) -> bytes:
    """Export a forward pass in evaluation mode for `read_program`, with batches of any size.

    The module is on the CPU, and left as it was. ``example_inputs`` are one batch, ``(batch, ...)``
    each, of at least one sample: a tuple by position, a dict by name, or an `InputExample`, whose
    lengths stay free as well. ConfigError if torch cannot export it, or the program does something
    else than the module.
    """
    if isinstance(module, ProgramModule):
        return module.archive
    example, buffer = _checked(example_inputs), io.BytesIO()
    num_rows = example.arguments.num_rows
    with evaluation_mode(module), _exporting():
        program = _export(module, example)
        _strip(program)
        torch.export.save(program, buffer)
        others = _unlisted_operators(buffer.getvalue())
        if others:
            logger.warning(
                "the exported program has the operators %s, which are not known to be safe: it can "
                "be loaded with trusted=%s only",
                ", ".join(others),
                list(others),
            )
        exported = read_program(buffer.getvalue(), Trust(others))
        batches = [example, *(example.rows(count * num_rows) for count in (2, 3))]
        for tried in (*batches, example.shorter(), *_single_row(module, example)):
            found, expected = (tried.arguments.call(made) for made in (exported, module))
            torch.testing.assert_close(found, expected, equal_nan=True)
    return buffer.getvalue()


def export_program(module: nn.Module, example_inputs: Given) -> torch.export.ExportedProgram:
    """A module's forward pass in evaluation mode as a graph, for batches of any size.

    Arguments are those of `write_program`. ConfigError if torch cannot export it.
    """
    if isinstance(module, ProgramModule):
        return module.exported()
    example = _checked(example_inputs)
    with evaluation_mode(module), _exporting():
        return _export(module, example)


def read_program(archive: bytes, trust: Trust = USUAL) -> ProgramModule:
    """Make a module of what `write_program` wrote.

    The packages of ``trust`` may name operators that are not in the list, such as
    ``torch.ops.aten.as_strided``, or all of a library, ``torch.ops.torchvision``. StorageError if
    the archive is damaged, or holds what could run code while it is read, or operators that are
    neither in the list nor trusted.
    """
    try:
        return ProgramModule(archive, trust)
    except StorageError:
        raise
    except Exception as error:  # torch raises many types for malformed archives
        raise StorageError(f"the exported program cannot be read: {error!r}") from error


def _checked(example_inputs: Given) -> InputExample:
    example = as_example(example_inputs)
    if not example.values or any(x.dim() == 0 or not len(x) for x in example.values):
        raise ConfigError("an export needs example inputs of shape (batch, ...) with a sample each")
    if any(x.is_sparse for x in example.values):
        raise ConfigError("torch.export takes no sparse tensors; use Sparse(..., dense=True)")
    return example


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Without gradients, and without torch's warnings: what comes out is compared with the module.

    ConfigError if the block has failed.
    """
    try:
        with (
            silenced(*_TRACERS, level=logging.CRITICAL),
            contextlib.redirect_stderr(io.StringIO()),  # the graph as far as torch came
        ):
            yield
    except Exception as error:  # whatever the module's forward or torch's tracer raise
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        if isinstance(error, GuardOnDataDependentSymNode):  # whose message is a page
            raise ConfigError(
                "torch.export cannot export it (forward branches on values of its tensors)"
            ) from None
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"torch.export cannot export it ({type(error).__name__}: {reason})"
        ) from error


@contextlib.contextmanager
def silenced(*names: str, level: int) -> Iterator[None]:
    """Without gradients, warnings, and lines of loggers of torch's below ``level``."""
    loggers = [logging.getLogger(name) for name in names]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(level)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, own in zip(loggers, before, strict=True):
            one.setLevel(own)


def _export(module: nn.Module, example: InputExample) -> torch.export.ExportedProgram:
    # torch.export takes sizes 0 and 1 for constants, so the example needs two samples or more.
    pair = example.rows(2 * example.arguments.num_rows)
    batch = torch.export.Dim("batch", min=1)

    def shape(value: Any) -> Any:
        if isinstance(value, tuple):  # torch takes ``*inputs`` for one argument
            return tuple(map(shape, value))
        if isinstance(value, dict):
            return {name: shape(item) for name, item in value.items()}
        return {0: batch, 1: torch.export.Dim.DYNAMIC} if pair.has_length(value) else {0: batch}

    positional, by_name = pair.arguments.positional, pair.arguments.by_name
    bound = signature(module.forward).bind(*positional, **by_name).arguments
    export = partial(torch.export.export, module, positional, by_name, dynamic_shapes=shape(bound))
    try:
        return export(strict=False)
    except Exception as error:  # whatever the module's forward or torch's tracer raise
        # What reads Python's code knows len(x), int(x.shape[0]) and float(len(x)) besides.
        with contextlib.suppress(Exception):
            return export(strict=True)
        raise error


def _single_row(module: nn.Module, example: InputExample) -> list[InputExample]:
    """The first row alone, if the module takes a single one."""
    single = example.rows(1)
    with contextlib.suppress(Exception):
        single.arguments.call(module)
        return [single]
    return []


def _strip(program: torch.export.ExportedProgram) -> None:
    """Leave out what only pickle could hold, and paths of this machine."""
    program._example_inputs = None
    program._guards_code = []
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.meta.clear()
            for node in part.graph.nodes:
                node.meta = {key: item for key, item in node.meta.items() if key == "val"}


def _open(archive: bytes) -> PT2ArchiveReader:
    from torch.export.pt2_archive import PT2ArchiveReader

    return PT2ArchiveReader(io.BytesIO(archive))


def _check_archive(archive: bytes, trust: Trust) -> None:
    reader = _open(archive)
    names = reader.get_file_names()
    for name in names:
        if not _ENTRY.fullmatch(name):
            raise _refusal(f"the entry {name}")
    if len(set(names)) != len(names):
        raise _refusal("two entries of one name")
    if "data/sample_inputs/model.pt" in names and reader.read_bytes("data/sample_inputs/model.pt"):
        raise _refusal("pickled sample inputs")
    for name in _CONFIGS:
        config = json.loads(reader.read_string(name))["config"]
        if any(entry["use_pickle"] is not False for entry in config.values()):
            raise _refusal("a pickled tensor or object")
        _check_names(config, "config", trust)
    model = json.loads(reader.read_string(_MODEL))
    if model.get("guards_code"):
        raise _refusal("Python source in its guards")
    _check_operators((text for text, key in _texts(model, "") if key == "target"), trust)
    _check_names(model, "", trust)


def _check_names(value: Any, key: str, trust: Trust) -> None:
    """Look at every string of a JSON value: what it may be depends on the key above it."""
    for text, above in _texts(value, key):
        _check_text(text, above, trust)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every string of a JSON value, and the key above it, whose names are looked at."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not _NAME.fullmatch(name):
                raise _refusal(f"the name {name!r}")
            if name == "metadata" and item:
                raise _refusal("metadata of nodes")
            yield from _texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield value, key


def _check_operators(texts: Iterable[str], trust: Trust) -> None:
    """Refuse operators that are neither in the list nor trusted, all at once; StorageError."""
    refused = sorted(
        {
            text
            for text in texts
            if not _is_allowed(text) and not (_OPERATOR.fullmatch(text) and trust.names(text))
        }
    )
    if refused:
        names = sorted({text.rpartition(".")[0] or text for text in refused})
        raise StorageError(
            f"the exported program holds the operator {' and the operator '.join(refused)}, not "
            "among those that are known to stay within their tensors; save the model again from an "
            f"importable factory, or load it with trusted={names} if you trust whoever wrote it"
        )


def _check_text(text: str, key: str, trust: Trust) -> None:
    if key == "as_operator":  # control flow would call it without the checks of `_check_calls`
        raise _refusal(f"the argument {text!r}, an operator")
    if key == "target":
        _check_operators([text], trust)
    elif key == "expr_str":
        words = _WORD.findall(text)
        if not _EXPRESSION.fullmatch(text) or not all(
            _FUNCTIONS.fullmatch(word) or _SYMBOL.fullmatch(word) for word in words
        ):
            raise _refusal(f"the size {text!r}")
        if not _has_small_powers(text):
            raise StorageError(
                f"the exported program holds the size {text[:200]!r}, a power that could take any "
                "time to compute; save the model again, or make it from an importable factory"
            )
    elif key in ("in_spec", "out_spec"):
        _check_spec(json.loads(text)[1])
    elif key != "as_string" and not _NAME.fullmatch(text):  # strings stay strings in the program
        raise _refusal(f"the name {text!r}")


def _has_small_powers(text: str) -> bool:
    """True if the powers of an expression, which sympy computes at once, have few digits."""
    try:
        todo: list[tuple[ast.AST, int]] = [(ast.parse(text.strip(), mode="eval"), 0)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    while todo:
        one, depth = todo.pop()
        parts = [*ast.iter_child_nodes(one)]
        if _is_power(one):
            depth += 1
            exponents = [one.right] if isinstance(one, ast.BinOp) else parts[2:]
            inner = [node for exponent in exponents for node in ast.walk(exponent)]
            values = [node.value for node in inner if isinstance(node, ast.Constant)]
            numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
            is_small = len(numbers) < 2 and all(abs(value) <= _MOST_POWER for value in numbers)
            if depth > _MOST_POWERS or not is_small or any(map(_is_power, inner)):
                return False
        todo += [(part, depth) for part in parts]
    return True


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow | ast.LShift)
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in _POWERS


def _is_allowed(operator: str) -> bool:
    """True if an operator is in the list, and does not write to a tensor that it is given."""
    found = _OPERATOR.fullmatch(operator)
    if found is None:
        return _OTHER_OPERATOR.fullmatch(operator) is not None
    writes_elsewhere = "out" in found["overload"].split("_")
    is_listed = found["name"] in ALLOWED and operator not in UNCHECKED
    return is_listed and not writes_elsewhere and has_tensors(found["name"], found["overload"])


def _unlisted_operators(archive: bytes) -> tuple[str, ...]:
    """Operators of an archive that `read_program` must be told to trust, without overloads."""
    model = json.loads(_open(archive).read_string(_MODEL))
    operators = [text for text, key in _texts(model, "") if key == "target"]
    found = (_OPERATOR.fullmatch(text) for text in operators if not _is_allowed(text))
    return tuple(sorted({match[1] for match in found if match is not None}))


def _check_calls(part: torch.fx.GraphModule) -> None:
    """Have sizes looked at where the operators do not; StorageError for odd constants."""
    for node in part.graph.nodes:
        name = strange_constant(node.target, node.args, node.kwargs)
        if name is not None:
            raise StorageError(
                f"the exported program gives {node.target} another {name} than torch has, which "
                "would read memory; save the model again, or make it from an importable factory"
            )
    checked = [node for node in part.graph.nodes if node.target in CHECKED]
    for node in checked:
        node.target = CHECKED[node.target]
    if checked:
        part.recompile()


def _check_spec(spec: Any) -> None:
    """The shape of a call's arguments: nested tuples, lists and dicts of tensors."""
    if spec["type"] not in _CONTAINERS:
        raise _refusal(f"the container {spec['type']!r}")
    context = json.loads(spec["context"] or "null")
    for name in context if isinstance(context, list) else [] if context is None else [context]:
        if not isinstance(name, str | int) or not _NAME.fullmatch(str(name)):
            raise _refusal(f"the key {name!r}")
    for child in spec["children_spec"]:
        _check_spec(child)


def _refusal(what: str) -> StorageError:
    return StorageError(
        f"the exported program holds {what}, which could run code while it is read; save the "
        f"model again, or make it from an importable factory"
    )
