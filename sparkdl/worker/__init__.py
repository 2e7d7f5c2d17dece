"""The life of one rank inside a Spark task."""
