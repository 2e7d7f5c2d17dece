"""What is known of a run: its record, the folder that holds it, and what it is made of."""
