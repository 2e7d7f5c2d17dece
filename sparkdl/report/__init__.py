"""What is left of a run for people to read? Its record, as JSON and as a page."""
