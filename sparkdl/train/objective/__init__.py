"""The objective and the measurements of training: losses, metrics, training steps."""
