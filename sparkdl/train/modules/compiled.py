"""Compiles a module with torch.compile, in place: parameters keep their names, hooks and memory.

The sizes of batches and sequences are variables of the compiled code from the first call on, so one
piece of code serves them all. Where code for one size is much faster, as sums over a batch are on
GPUs, the size that most batches have gets code of its own. Dropout draws the numbers that it draws
without compilation.
"""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparkdl.data.collate import Arguments
from sparkdl.errors import ClusterError
from sparkdl.train.modules.restore import restored

_NUMBERS = itertools.count()


def compile_in_place(
    module: nn.Module,
    device: torch.device,
    example: Arguments | None,
    parts: Sequence[nn.Module] | None = None,
    *,
    usual_rows: int | None = None,
) -> None:
    """Have calls of ``module`` run compiled code; it is compiled when it is first called.

    Copies of the module are not compiled, nor is what unpickles it.

    Args:
        module: on ``device`` already.
        device: where it computes.
        example: inputs for which the compiler optimizes. So its code follows from them, not from
            the first batch of a worker, and training that goes on gives the same bits. (Not where
            batches are of very different sizes: a sum of more than 4096 numbers has other code.)
            The module is called on them before its first training batch; it is then as before, see
            `restored`. None: a training step calls the module or its
            children, one by one; all of these are compiled, for what they are first called with.
        parts: layers of ``module``, which are compiled one by one in place of the whole.
        usual_rows: size of a batch that gets code of its own; None: none does.

    Raises:
        ClusterError: torch has nothing here to compile for CPUs with.
    """
    if device.type == "cpu":
        require_compiler()
    _find_globals()
    if parts is not None:
        for part in parts:  # without hooks, in which torch gathers weights
            part.forward = _Compiled(part, None, part.forward)
        module._compiled_call_impl = _Compiled(module, example, is_compiled=False)
    else:
        for part in (module, *(module.children() if example is None else ())):
            own = _Compiled(part, example, usual_rows=usual_rows)
            part._compiled_call_impl = own  # torch's own place for it
    if example is not None:  # torch's caches would give code for other examples
        sizes = [tuple(value.shape) for value in example.values]
        torch.compiler.config.cache_key_tag = f"sparkdl {sizes}"


class _Globals(types.ModuleType):
    """Globals of code as attributes of a module."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        super().__init__(name)
        vars(self).clear()
        vars(self)[_VALUES] = values

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)[_VALUES][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[_VALUES][name] = value


_VALUES = "values of sparkdl"
"""The one attribute of `_Globals` itself; no global has that name."""


def _find_globals() -> None:
    """Have torch's compiler look for globals of code where that has them.

    It imports the module whose name they have, which a worker has not, or which is its own
    ``__main__``, where code came from a script or a notebook. Now it imports a `_Globals`, whose
    name they have while it looks.
    """
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator as Translator

    look = getattr(Translator, "get_globals_source_and_value", None)
    if look is None or hasattr(look, "__wrapped__"):
        return  # another version of torch; or it does

    @functools.wraps(look)
    def get_globals_source_and_value(self: Any, name: str) -> Any:
        own = self.f_globals
        named = own.get("__name__")
        module = sys.modules.get(named) if isinstance(named, str) else None
        is_there = module is not None and vars(module) is own
        if is_there or not isinstance(named, str) or named.startswith("namedtuple_"):
            return look(self, name)
        alias = f"_sparkdl_globals_{id(own)}"  # which stays: the module holds them
        sys.modules.setdefault(alias, _Globals(alias, own))
        own["__name__"] = alias
        try:
            return look(self, name)
        finally:
            own["__name__"] = named

    Translator.get_globals_source_and_value = get_globals_source_and_value  # type: ignore[method-assign]


def require_compiler() -> None:
    """Raise ClusterError if there is no C++ compiler here, or no headers of Python."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    problem = None
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        problem = "no C++ compiler: neither g++ on the PATH nor what CXX names can be started"
    if problem is None and not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problem = f"no headers of Python: {sysconfig.get_path('include')}/Python.h is missing"
    if problem is not None:
        raise ClusterError(
            f"compile=True: this worker has {problem}; install g++ and Python's headers (packages "
            "such as g++ and python3-dev) on all executors, or leave compile out"
        )


class _Compiled:
    """Calls a module's compiled code."""

    # Not `nn.Module.compile`: it compiles nothing of torch's own containers, such as Sequential.
    def __init__(
        self,
        part: nn.Module,
        example: Arguments | None,
        call: Callable[..., Any] | None = None,
        *,
        is_compiled: bool = True,
        usual_rows: int | None = None,
    ) -> None:
        """Compile ``part``; ``call`` computes it, by default with its hooks.

        Without ``is_compiled`` only layers of ``part`` have compiled code. Batches of
        ``usual_rows`` have code of their own.
        """
        call = call or part._call_impl
        self._call = _compiled(call) if is_compiled else call
        self._usual = None if usual_rows is None else _compiled(call)
        self._usual_rows = usual_rows
        self._is_compiled = is_compiled
        self._part, self._example = part, example

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it is a part of a module that is compiled
            return self._call(*args, **kwargs)
        if self._usual is not None and self._usual_rows is not None:
            found = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
            if all(v.dim() > 0 and len(v) == self._usual_rows for v in found):
                return self._usual(*args, **kwargs)
        if self._example is not None and self._part.training and torch.is_grad_enabled():
            example, self._example = self._example, None
            with (
                torch.random.fork_rng(devices={v.device for v in example.values if v.is_cuda}),
                restored(self._part),
            ):
                example.call(self._for_all_sizes)
        return self._for_all_sizes(*args, **kwargs)

    def _for_all_sizes(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    torch._dynamo.maybe_mark_dynamic(value, [*range(min(2, value.dim()))])
        return self._call(*args, **kwargs)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # torch keeps what it has compiled by code objects, for each a few, and by their names which
    # sizes it has seen: none is shared.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    made: Callable[..., Any] = torch.compile(forward, options={"fallback_random": True})
    return made
