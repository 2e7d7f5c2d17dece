"""Is everything there that training needs? Asked by ``sparkdl doctor``, answered line by line."""
