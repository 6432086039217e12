"""The published architectures, by diffusers' and transformers' keys: what the benchmarks give random weights."""

from typing import Any

VAE = {
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "sample_size": 512, "force_upcast": False,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
# model -> part -> what differs from the defaults, which diffusers and MaxDiff share.
ARCHITECTURES: dict[str, dict[str, dict[str, Any]]] = {
    "sd15": {
        "unet": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        "vae": VAE,
        "text_encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                         "projection_dim": 768},
    },
    "sd2": {
        "unet": {"sample_size": 64, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20],
                 "use_linear_projection": True},
        "vae": VAE,
        "text_encoder": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
                         "hidden_act": "gelu"},
    },
    "sdxl": {
        "unet": {"sample_size": 128, "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20],
                 "use_linear_projection": True, "block_out_channels": [320, 640, 1280],
                 "transformer_layers_per_block": [1, 2, 10],
                 "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                 "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                 "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
                 "projection_class_embeddings_input_dim": 2816},
        "vae": {**VAE, "sample_size": 1024, "scaling_factor": 0.13025},
        "text_encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                         "projection_dim": 768},
        "text_encoder_2": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
                           "hidden_act": "gelu", "projection_dim": 1280, "architectures": ["CLIPTextModelWithProjection"]},
    },
}  # fmt: skip
