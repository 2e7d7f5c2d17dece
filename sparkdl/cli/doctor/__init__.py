"""The checks of ``sparkdl doctor``: what machine and cluster have of what training needs."""
