"""The spool: a shard's columns, written once to local disk and mapped into memory."""
