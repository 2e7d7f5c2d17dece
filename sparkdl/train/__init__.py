"""The training loop of one rank: step, validation, callbacks, state."""
