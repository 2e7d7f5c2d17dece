"""Values and modules on their way to other processes, in memory only."""
