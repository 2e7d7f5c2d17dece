"""What do all our Params classes share?

Refusal of unknown names, reading of optional values, and accessors: a Param is declared once,
with its doc and its converter, and its ``setX`` and ``getX`` follow from the declaration.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

P = TypeVar("P", bound="CheckedParams")
C = TypeVar("C", bound=type[Params])


def declare(name: str, doc: str, converter: Callable[[Any], Any]) -> Param[Any]:
    """Declare a Param in the body of a class."""
    return Param(Params._dummy(), name, doc, typeConverter=converter)


class CheckedParams(Params):
    """Params that refuse unknown names, and None where a value is needed."""

    def _set(self: P, **kwargs: Any) -> P:
        for name, value in kwargs.items():
            if name not in self._names():
                raise TypeError(f"{type(self).__name__} has no Param {name!r}{self._hint(name)}")
            if value is None and self._defaultParamMap.get(self.getParam(name)) is not None:
                raise TypeError(f'Invalid param value given for param "{name}": None')
        super()._set(**kwargs)
        return self

    def _names(self) -> list[str]:
        return [param.name for param in self.params]

    def _hint(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._names(), n=1)
        return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(self._names())}"

    def value(self, name: str) -> Any:
        """The Param's value; None if it has none. An empty column name counts as none."""
        param = self.getParam(name)
        value = self.getOrDefault(param) if self.isDefined(param) else None
        return None if value == "" and name.endswith("Col") else value


def with_accessors(cls: C) -> C:
    """Class decorator: give the class ``setX`` and ``getX`` for every Param X that lacks them."""
    for name in dir(cls):
        param = getattr(cls, name)
        if isinstance(param, Param):
            suffix = name[0].upper() + name[1:]
            for accessor in (_setter(param, suffix), _getter(param, suffix)):
                if not hasattr(cls, accessor.__name__):
                    accessor.__qualname__ = f"{cls.__name__}.{accessor.__name__}"
                    accessor.__module__ = cls.__module__
                    setattr(cls, accessor.__name__, accessor)
    return cls


def _setter(param: Param[Any], suffix: str) -> Callable[..., Any]:
    def setter(self: P, value: Any) -> P:
        return self._set(**{param.name: value})

    setter.__name__ = f"set{suffix}"
    setter.__doc__ = f"Set {param.name}: {param.doc}"
    return setter


def _getter(param: Param[Any], suffix: str) -> Callable[..., Any]:
    def getter(self: Params) -> Any:
        return self.getOrDefault(param.name)

    getter.__name__ = f"get{suffix}"
    getter.__doc__ = f"Return {param.name}: {param.doc}"
    return getter
