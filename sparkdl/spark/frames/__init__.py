"""DataFrames and sources as tables of shards."""
