"""The values of a run, its record, and its checkpoints, in a gang and in rounds alike."""
