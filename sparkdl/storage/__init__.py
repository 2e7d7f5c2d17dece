"""Folders of files on local disk, HDFS or S3, and the checkpoints in them."""
