"""From folders of image files to Parquet that can be trained on."""
