"""What is done to a module before it trains: precision, memory format, SyncBatchNorm."""
