"""The driver's side of ``explain``."""
