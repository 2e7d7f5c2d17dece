"""The server of ``sparkdl ui``, which shows the runs of a directory in a browser."""
