"""The record of a run, the folder that holds it, and the graph of the module that it trains."""
