"""MaxDiff: Stable Diffusion in JAX, trained and sampled on TPUs and GPUs."""

from maxdiff.pipeline import Part, Pipeline

__all__ = ["Part", "Pipeline"]
