"""The cluster: what it offers, its slots, and the gang that is started and watched on it."""
