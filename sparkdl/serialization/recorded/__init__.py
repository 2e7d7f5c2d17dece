"""Weights that a factory gives a module, made one tensor at a time wherever they are needed."""
