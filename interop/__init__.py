"""Weights in and out (timm, Hugging Face, torch, safetensors), and other libraries' ViTs to compare with."""
