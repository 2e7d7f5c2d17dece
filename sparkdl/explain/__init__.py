"""The cost model: what a fit will do and how long it will take. It needs no Spark."""
