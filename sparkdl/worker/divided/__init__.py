"""The weights of a divided model as they come to a rank, and as ranks write them."""
