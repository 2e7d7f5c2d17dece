"""From record batches to batches of tensors."""
