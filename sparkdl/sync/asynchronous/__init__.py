"""Strategies whose replicas do not wait for each other."""
