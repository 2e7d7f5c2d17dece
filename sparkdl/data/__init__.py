"""Rows on their way into batches of tensors: plan, order, columns, collation."""
