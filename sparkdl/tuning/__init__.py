"""The search for hyperparameters: Optuna chooses values, each trial is a fit over one spool."""
