"""Training in rounds: plain Spark jobs, with the state kept on the driver."""
