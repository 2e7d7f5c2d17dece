"""A trained module applied to rows: predictions, outputs, scores."""
