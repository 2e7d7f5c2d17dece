"""What is minimized and what is measured: losses, metrics, training steps."""
