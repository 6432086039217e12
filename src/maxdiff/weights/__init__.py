"""Weights between files and parameter trees: diffusers folders, single files, PyTorch or Flax."""
