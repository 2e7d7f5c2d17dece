"""Listeners, such as TensorBoard and MLflow, that watch a run from its driver."""
