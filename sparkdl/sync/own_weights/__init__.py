"""Strategies whose replicas keep weights of their own between rounds."""
