"""What will a fit do, how long will it take, and what would be better? See docs/explain.md."""
