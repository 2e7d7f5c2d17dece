"""A Spark session: its settings, storage, failures, and how its jobs are cancelled."""
