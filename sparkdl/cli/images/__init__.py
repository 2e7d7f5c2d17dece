"""Folders of image files made into Parquet, by ``sparkdl prepare``."""
