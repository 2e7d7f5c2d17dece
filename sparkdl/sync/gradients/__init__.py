"""Strategies that sum gradients in every step."""
