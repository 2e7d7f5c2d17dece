"""Sources whose rows the workers read by themselves, without a DataFrame."""
