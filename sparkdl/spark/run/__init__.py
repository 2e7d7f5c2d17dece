"""What both ways of training share: a run, its key, its record, its resumption."""
