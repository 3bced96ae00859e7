"""Code generated from proto/ by proto/generate.py."""
