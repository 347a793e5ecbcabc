"""The safetensors format and what checkpoints are made of: pure code over bytes and names."""
