"""What can be done from a shell? One file per subcommand of ``sparkdl``."""
