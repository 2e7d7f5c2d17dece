"""What sparkdl does with Spark: columns, shards, gang and supervision."""
