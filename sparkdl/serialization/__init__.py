"""A user's module as bytes, files or a graph, and back."""
