"""What a worker does between its first and its last batch. Needs torch, knows nothing of Spark."""
