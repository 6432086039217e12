"""The diffusion process, apart from any network: noise schedule, training objective, samplers."""
