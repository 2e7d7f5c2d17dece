"""What the program itself has set or counted outside of modules: told, sent, and put back."""
