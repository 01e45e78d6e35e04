"""Prompts, chat masks, target responses, packing and the datamodules over them."""
