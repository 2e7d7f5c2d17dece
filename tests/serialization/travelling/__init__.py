"""Modules of many kinds, and the two processes between which they travel."""
