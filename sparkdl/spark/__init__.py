"""Everything that calls pyspark."""
