"""Job files: what may stand in them, how they are read, and the session and rows that they name."""
