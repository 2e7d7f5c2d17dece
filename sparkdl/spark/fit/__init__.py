"""The driver's side of ``fit``."""
