"""One Python process: its versions, hardware, threads and log, and the names of its objects."""
