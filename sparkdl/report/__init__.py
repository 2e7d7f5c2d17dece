"""What a run tells people: its record, page, live views, listeners and server."""
