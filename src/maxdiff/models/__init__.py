"""Stable Diffusion's networks: single-device code that knows no mesh, no file and no run."""
