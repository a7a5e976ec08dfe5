"""The Qwen decoder: layers, attention kernels, sharding, LoRA, Hugging Face files, tokenizer."""
