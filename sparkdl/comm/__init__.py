"""Messages between the ranks of a gang, and between them and the driver."""
