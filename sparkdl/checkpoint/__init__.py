"""Checkpoints: what they hold, where they lie, and how a running gang writes them."""
