"""Changes to a module that trains: precision, memory format, SyncBatchNorm, torch.compile."""
