"""The command line: job files, commands, doctor, tuning, image preparation."""
