"""Load formats for inference engines, and transformers: each is imported by whoever has that package."""
