"""The page that a run leaves, as one HTML file without scripts."""
