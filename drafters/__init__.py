"""Plain PyTorch drafters: blocks, losses, length policies, verification, decoding."""
