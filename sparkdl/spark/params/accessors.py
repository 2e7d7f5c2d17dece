"""Bases of the classes with Params, by which type checkers know these.

To Python they are nothing. ``accessors.pyi`` has them with the Params of each, their setters and
their getters; a test makes it from the table.
"""

from __future__ import annotations

RegressorAccessors = ClassifierAccessors = LabelsAccessors = object
ModelAccessors = ClassifierModelAccessors = object
