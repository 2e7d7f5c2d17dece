"""A model divided among the workers of a mesh: its layers, its state, and what sums over it."""
