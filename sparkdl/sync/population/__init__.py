"""Strategies whose replicas compete, or are merged only at the end."""
