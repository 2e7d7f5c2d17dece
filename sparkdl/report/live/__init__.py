"""Live views of a run: a progress bar in a console, curves in a notebook."""
