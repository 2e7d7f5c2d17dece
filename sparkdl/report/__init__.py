"""Reports of a run: its record, page, live views, listeners and server."""
