"""A fake of cuda-bindings for machines without a GPU. See driver.py."""
