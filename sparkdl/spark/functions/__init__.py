"""The driver's side of `TorchRunner`."""
