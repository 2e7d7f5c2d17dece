"""The search for hyperparameters of ``sparkdl tune``."""
