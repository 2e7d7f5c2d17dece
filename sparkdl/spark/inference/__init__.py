"""The driver's side of ``transform``, ``evaluate`` and ``scores``."""
